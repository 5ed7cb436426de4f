'use strict';

/* The page: knobs, numbers, curves and the plane. It knows labels and slider
 * ranges; what is computed is simulator.js's, every number is Python's. */
(() => {
  const $ = (id) => document.getElementById(id);
  const DATA = JSON.parse($('data').textContent);
  const DEFAULTS = DATA.numbers.defaults;
  const CHOICES = DATA.numbers.choices;
  const HELP = Object.fromEntries(Object.entries(DATA.help).map(
      ([name, text]) => [name, text.replaceAll('`', '')]));
  const simulator = makeSimulator(DATA.numbers);
  const {element, number} = draw;

  window.addEventListener('error', (event) => {
    document.documentElement.dataset.error = event.message;
  });

  // ---- knobs: [name, label, unit, stops of the slider] ---------------------

  const linear = (low, high, step) => Array.from(
      {length: Math.round((high - low) / step) + 1},
      (_, i) => Number((low + i * step).toPrecision(6)));
  const growing = (low, high, perDouble) => {
    const count = Math.round(Math.log2(high / low) * perDouble);
    const values = Array.from(
        {length: count + 1}, (_, i) => low * 2 ** (i / perDouble));
    return values.map((x) => Number(x.toPrecision(x < 1000 ? 3 : 4)));
  };
  const powers = (low, high) => growing(low, high, 1).map(Math.round);
  const around = (name) => growing(DEFAULTS[name] / 4, DEFAULTS[name] * 4, 8);

  const GROUPS = [
    ['System', true, [
      ['samplers', 'Samplers', 'slots', linear(8, 512, 8)],
      ['batch', 'Batch', 'groups', linear(4, 128, 4)],
      ['horizon', 'Horizon', 'tokens', powers(256, 131072)],
      ['max_staleness', 'Max staleness K', 'updates', linear(0, 32, 1)],
      ['sync_interval', 'Sync interval', 'updates', linear(1, 16, 1)],
      ['sync_latency', 'Sync latency', 's', linear(0, 30, 0.5)],
      ['in_flight_update', 'In-flight update'],
    ]],
    ['Efficiency', true, [
      ['rollout', 'Rollout precision'],
      ['train', 'Training precision'],
      ['kv_fp8', 'KV cache in FP8'],
      ['shared_quantizer', 'One shared quantizer'],
      ['hardware', 'Hardware'],
      ['nvfp4_train_overhead', 'W4A4 training overhead', 'share',
       linear(-0.5, 0.95, 0.05)],
      ['mismatch', 'Mismatch table'],
    ]],
    ['Stabilizers', true, [
      ['backward', 'Backward'],
      ['last_layers_bf16', 'Last layers in BF16', 'share',
       linear(0, 1, 0.05)],
      ['shared_experts_bf16', 'Shared experts in BF16'],
      ['four_over_six', 'Four over six (4/6)'],
      ['correction', 'Correction'],
      ['tis_cap', 'TIS cap C', 'ratio', linear(1, 10, 0.25)],
      ['routing_replay', 'Routing replay (R3)'],
    ]],
    ['Workload and speeds', false, [
      ['mean_length', 'Mean length', 'tokens', growing(64, 32768, 4)],
      ['length_cv', 'Length spread', 'cv', linear(0, 3, 0.1)],
      ['group_size', 'Group size G', 'responses', linear(1, 32, 1)],
      ['turns', 'Turns', 'calls', linear(0, 32, 1)],
      ['environment_latency', 'Environment latency', 's', linear(0, 60, 1)],
      ['buffer_batches', 'Buffer', 'batches', linear(1, 8, 0.25)],
      ['sampler_speed', 'Sampler speed', 'tokens/s', growing(5, 500, 4)],
      ['trainer_speed', 'Trainer speed', 'tokens/s', growing(1e3, 1e6, 4)],
      ['step_overhead', 'Step overhead', 's', linear(0, 60, 1)],
      ['steps', 'Updates', 'updates', linear(50, 1000, 50)],
      ['seed', 'Seed', '', linear(0, 31, 1)],
    ]],
    ['Constants of the drift, inferred', false, [
      ['learning_rate', 'Learning rate', '', around('learning_rate')],
      ['staleness', 'Staleness s of lag 1', 'nats', around('staleness')],
      ['staleness_power', 'Power of the lag', '', linear(0, 1.5, 0.05)],
      ['capacity', 'Capacity c', 'nats²', around('capacity')],
      ['drift_decay', 'Decay ρ', 'per update', linear(0.8, 0.99, 0.005)],
      ['drift_gain', 'Gain γ', '', around('drift_gain')],
      ['amplification', 'Amplification η', '', around('amplification')],
      ['drift_threshold', 'Threshold D*', 'nats', around('drift_threshold')],
      ['learning', 'Learning a', 'per update', around('learning')],
      ['damage', 'Damage b', 'per nat', around('damage')],
      ['shared_experts_factor', 'Shared experts, factor', '',
       linear(0.05, 1, 0.05)],
      ['reward_start', 'Reward at the start', '', linear(0, 1, 0.02)],
      ['reward_max', 'Largest reward', '', linear(0.02, 2, 0.02)],
    ]],
  ];
  const START = {...DEFAULTS, seed: 0};  // the seed is no field of Python's

  const state = {
    cfg: {...START},  // as the controls show it, perhaps refused
    valid: {...START},  // the last one that was not
    result: null,
  };
  const controls = {};  // by knob: shows a value

  function buildKnobs() {
    const narrow = window.matchMedia('(max-width: 859px)').matches;
    for (const [title, open, knobs] of GROUPS) {
      const box = element('details', {open: open && !narrow});
      box.append(element('summary', {textContent: title}));
      for (const knob of knobs) box.append(buildKnob(...knob));
      $('knobs').append(box);
    }
    $('knobs').addEventListener('submit', (event) => event.preventDefault());
  }

  function buildKnob(name, label, unit, stops) {
    const id = `knob-${name}`;
    const help = element('p', {
      className: 'note',
      id: `${id}-help`,
      textContent: HELP[name] || 'of the random lengths.',
    });
    const value = element('span', {className: 'knob-value'});
    const head = element(
        'div', {className: 'knob-head'},
        element('label', {htmlFor: id, textContent: label}), value);
    const box = element('div', {className: 'knob'}, head);
    const describe = (input) =>
      input.setAttribute('aria-describedby', help.id);
    let show;
    if (name in CHOICES) {
      const select = element('select', {id});
      for (const choice of CHOICES[name]) {
        select.append(element('option', {
          value: choice, textContent: choice.replaceAll('_', ' '),
        }));
      }
      select.addEventListener('change', () => turn(name, select.value));
      describe(select);
      value.append(select);
      show = (x) => { select.value = x; };
    } else if (typeof START[name] === 'boolean') {
      const check = element('input', {id, type: 'checkbox'});
      check.addEventListener('change', () => turn(name, check.checked));
      describe(check);
      value.append(check);
      show = (x) => { check.checked = x; };
    } else {
      const exact = element('input', {
        id, type: 'number', step: 'any', inputMode: 'decimal',
      });
      const slider = element('input', {
        type: 'range', min: 0, max: stops.length - 1, step: 1,
      });
      slider.setAttribute('aria-label', `${label}, slider`);
      describe(exact);
      exact.addEventListener('change', () =>
        turn(name, exact.value === '' ? NaN : Number(exact.value)));
      slider.addEventListener('input', () =>
        turn(name, stops[Number(slider.value)]));
      value.append(exact);
      if (unit) value.append(element('span', {
        className: 'unit', textContent: unit,
      }));
      box.append(slider);
      show = (x) => {
        if (Number.isFinite(x)) {
          if (exact.value === '' || Number(exact.value) !== x) exact.value = x;
          let at = 0;
          stops.forEach((stop, i) => {
            if (Math.abs(stop - x) < Math.abs(stops[at] - x)) at = i;
          });
          slider.value = at;
          const share = 100 * at / (stops.length - 1);
          slider.style.setProperty('--at', `${share}%`);
        }
        slider.setAttribute('aria-valuetext', `${x} ${unit}`);
      };
    }
    box.append(help);
    controls[name] = {box, show};
    return box;
  }

  function buildPresets() {
    for (const [name, change] of Object.entries(DATA.presets)) {
      const button = element('button', {type: 'button', textContent: name});
      button.addEventListener('click', () =>
        set({...START, ...change, seed: state.valid.seed}));
      button.change = change;
      $('presets').append(button);
    }
  }

  // ---- state ---------------------------------------------------------------

  function turn(name, value) {
    set({...state.cfg, [name]: value});
  }

  let waiting = false;

  /** Takes a configuration; what it does is shown with the next frame. */
  function set(cfg) {
    state.cfg = cfg;
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      update();
    });
  }

  function update() {
    const refused = compute(state.cfg);
    document.body.classList.toggle('refused', Boolean(refused));
    say(refused && `${refused.message} Shown is the last possible setting.`);
    for (const [name, {box, show}] of Object.entries(controls)) {
      show(state.cfg[name]);
      box.classList.toggle('refused', refused?.knob === name);
    }
    for (const button of $('presets').children) {
      const preset = {...START, ...button.change, seed: state.cfg.seed};
      const same = Object.keys(START).every((k) => preset[k] === state.cfg[k]);
      button.setAttribute('aria-pressed', String(same));
    }
    if (!refused) writeHash();
    if (refused && $('headline').children.length) return;
    showHeadline();
    charts.draw();
    plane.refresh();
    plane.draw();
  }

  /** Simulates; returns why not, and keeps the last result then. */
  function compute(cfg) {
    try {
      const whole = Number.isInteger(cfg.seed);
      if (!whole || cfg.seed < 0 || cfg.seed >= 2 ** 31) {
        const error = Error(`seed ${cfg.seed} is not in [0, 2^31).`);
        throw Object.assign(error, {knob: 'seed'});
      }
      const start = performance.now();
      state.result = simulator.simulate(cfg, cfg.seed);
      state.milliseconds = performance.now() - start;
      state.valid = cfg;
      return null;
    } catch (error) {
      if (!error.knob) throw error;
      return error;
    }
  }

  function say(text) {
    $('refused').hidden = !text;
    $('refused').textContent = text || '';
  }

  /** What differs from the defaults, as in #max_staleness=4&kv_fp8=true */
  function writeHash() {
    const changed = Object.keys(START)
        .filter((name) => state.cfg[name] !== START[name])
        .map((name) => `${name}=${state.cfg[name]}`);
    const hash = `#${changed.join('&')}`;
    if (hash !== (location.hash || '#')) history.replaceState(null, '', hash);
  }

  function readHash() {
    const cfg = {...START};
    const unknown = [];
    for (const part of location.hash.slice(1).split('&').filter(Boolean)) {
      const [name, value = ''] = part.split('=');
      if (!Object.hasOwn(START, name)) {
        unknown.push(name);
      } else if (typeof START[name] === 'boolean') {
        cfg[name] = {true: true, false: false}[value] ?? value;
      } else if (typeof START[name] === 'number') {
        cfg[name] = value.trim() === '' ? NaN : Number(value);
      } else {
        cfg[name] = value;
      }
    }
    return [cfg, unknown];
  }

  function load() {
    const [cfg, unknown] = readHash();
    state.cfg = cfg;
    update();
    if (unknown.length) say(`No knob is called ${unknown.join(', ')}.`);
  }

  // ---- numbers -------------------------------------------------------------

  const HEADLINE = [
    ['tokens_per_second', 'Trained tokens', (x) => number(x, 0), '/s'],
    ['steps_per_hour', 'Updates', (x) => number(x, 1), '/h'],
    ['margin', 'Margin to D*', (x) => number(x, x < -10 ? 0 : 3), 'nats'],
    ['collapse', 'Collapse', (x) => x < 0 ? 'none' : `at ${x}`, ''],
    ['final_reward', 'Final reward', (x) => number(x, 3), ''],
    ['dropped_fraction', 'Dropped groups', (x) => number(100 * x, 1), '%'],
    ['sampler_utilization', 'Samplers busy', (x) => number(100 * x, 1), '%'],
    ['trainer_utilization', 'Trainer busy', (x) => number(100 * x, 1), '%'],
    ['lag_mean', 'Mean lag', (x) => number(x, 2), 'updates'],
    ['stale', 'Staleness s', (x) => number(x, 4), 'nats'],
    ['quantization', 'Quantization q', (x) => number(x, 4), 'nats'],
    ['grad_norm', 'Largest gradient', (x) => number(x, 2), '× bf16'],
  ];

  function headlineValues() {
    const {events, outcome} = state.result;
    const norms = outcome.curves.grad_norm;
    const norm = norms.reduce((x, y) => Math.max(x, y));
    return {...events, ...outcome, grad_norm: norm};
  }

  function showHeadline() {
    const values = headlineValues();
    const tile = ([name, label, text, unit]) => {
      const shown = element('dd', {textContent: text(values[name])});
      shown.dataset.name = name;
      shown.dataset.value = values[name];
      if (unit) shown.append(' ', element('span', {
        className: 'unit', textContent: unit,
      }));
      return element('div', {}, element('dt', {textContent: label}), shown);
    };
    $('headline').replaceChildren(...HEADLINE.map(tile));
    const {collapse, margin} = values;
    let kind = 'stable', text = `Stable: margin ${number(margin, 2)} nats.`;
    if (collapse >= 0) {
      kind = 'collapses';
      text = `Collapses at update ${collapse}.`;
    } else if (margin < 0) {
      kind = 'crosses';
      text = `Crosses D* without a collapse in ${state.valid.steps} updates.`;
    }
    $('verdict').className = kind;
    $('verdict-text').textContent = text;
    $('verdict-speed').textContent =
        `${number(values.tokens_per_second, 0)} tokens/s`;
    document.documentElement.dataset.milliseconds =
        state.milliseconds.toFixed(1);
  }

  function buildAbout() {
    const labels = new Map(
        GROUPS.flatMap(([, , knobs]) => knobs).map(([k, label]) => [k, label]));
    const list = (what, text) => $('inferred').append(element(
        'li', {}, element('strong', {textContent: what}), `: ${text}`));
    for (const [name, text] of Object.entries(HELP)) {
      if (!/inferred|prototypes/i.test(text)) continue;
      list(`${labels.get(name)} = ${DEFAULTS[name]}`, text);
    }
    const {correction, routing_replay: replay} = DATA.numbers;
    const bonus = Object.entries(correction).map((pair) => pair.join(' '));
    list(`Bonus of a correction = ${bonus.join(', ')}`, 'on the capacity.');
    list(`Routing replay = ${replay}`, 'a factor on the capacity.');
    // The hash is the setting's, so this link goes there by itself.
    $('to-about').addEventListener('click', (event) => {
      event.preventDefault();
      $('about').scrollIntoView();
      $('about').focus({preventScroll: true});
    });
  }

  buildKnobs();
  buildPresets();
  buildAbout();
  const charts = makeCharts($('charts'), state);
  const plane = makePlane(DATA, simulator, state, set);
  compute(START);  // something to show, whatever the hash says
  load();
  window.addEventListener('hashchange', load);
  new ResizeObserver(() => requestAnimationFrame(() => {
    charts.draw();
    plane.draw();
  })).observe($('charts'));
})();
