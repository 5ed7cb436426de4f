'use strict';

/*
 * The plane of throughput and margin: random systems for the workload and the
 * constants that the knobs show, in slices of some ms. state: {valid, result}
 * of page.js; `set` takes a configuration.
 */
function makePlane(data, simulator, state, set) {
  const {element, number, signed, frame, LEFT, RIGHT} = draw;
  const $ = (id) => document.getElementById(id);
  const DEFAULTS = data.numbers.defaults;
  const CHOICES = data.numbers.choices;
  const cloud = [];  // {family, change, point: [tokens/s, margin], old}
  let chosen = null;  // of the cloud

  const SYSTEMS = 100;  // random ones, each at every precision
  const FAMILIES = Object.keys(data.families);
  const CALM = 150;  // ms without a change before the cloud follows
  const MOST_GROUPS = 2 ** 17;  // of a point of the cloud: tenths of a second

  /** Random numbers of the engine's generator: the same cloud on each visit. */
  function buildCloud() {
    let count = 0;
    const below = (n) =>
      (simulator.threefry(0, 1, count++, 0) >>> 0) % n;
    const pick = (values) => values[below(values.length)];
    const reset = {};  // families change these and nothing else
    for (const change of Object.values(data.families)) {
      for (const name of Object.keys(change)) reset[name] = DEFAULTS[name];
    }
    for (let i = 0; i < SYSTEMS; i++) {
      const interval = pick([1, 1, 1, 2, 4]);
      const system = {
        sync_interval: interval,
        max_staleness: interval - 1 + below(18 - interval),
        samplers: 8 * (4 + below(45)),
        batch: 8 * (1 + below(8)),
        in_flight_update: below(2) === 1,
        correction: pick(CHOICES.correction),
      };
      for (const family of FAMILIES) {
        const change = {...reset, ...data.families[family], ...system};
        cloud.push({family, change, point: null, old: true});
      }
    }
  }

  let events = new Map();  // by what they depend on
  let timer = 0;

  /** Starts over once the knobs rest; whoever has the same events is quick. */
  function refreshCloud() {
    for (const entry of cloud) entry.old = true;
    clearTimeout(timer);
    showProgress();
    const pending = [...cloud];
    const used = new Map();
    timer = setTimeout(() => slice(pending, used), CALM);
  }

  function slice(pending, used) {
    const start = performance.now();
    while (pending.length && performance.now() - start < 12) {
      follow(pending.shift(), used);
    }
    if (pending.length) {
      timer = setTimeout(() => slice(pending, used), 0);
    } else {
      events = used;
    }
    showProgress();
    const now = performance.now();
    if (pending.length && now - (slice.drawn || 0) < 200) return;
    slice.drawn = now;
    drawPlane();
  }

  /** Computes a point of the cloud for the present workload and constants. */
  function follow(entry, used) {
    const cfg = {...state.valid, ...entry.change};
    entry.old = false;
    entry.point = null;
    try {
      const {engine, drift} = simulator.knobs(cfg);
      const sizes = [cfg.seed, cfg.steps, cfg.group_size];
      const key = JSON.stringify([Object.values(engine), sizes]);
      let known = used.get(key) || events.get(key);
      if (!known) {
        const run = simulator.runEngine(engine, ...sizes, MOST_GROUPS);
        known = [run.steps.token_lag, run.tokens_per_second];
      }
      used.set(key, known);
      const outcome = simulator.runDrift(drift, known[0]);
      entry.point = [known[1], outcome.margin];
    } catch (error) {
      if (!error.knob) throw error;  // refused or too long: no point
    }
  }

  const computed = () =>
    cloud.filter((entry) => !entry.old && entry.point);

  function showProgress() {
    const total = cloud.length;
    const done = cloud.filter((entry) => !entry.old).length;
    const text = done < total ?
        `Computing: ${done} of ${total} systems.` :
        `${computed().length} systems of ${state.valid.steps} updates each; ` +
        `${total - computed().length} impossible or too long for a page.`;
    if ($('cloud-progress').textContent !== text) {
      $('cloud-progress').textContent = text;
    }
    const about = chosen?.point ? describe(chosen) : '';
    if ($('plane-text').textContent !== about) {
      $('plane-text').textContent = about;
    }
    document.documentElement.dataset.cloud = done < total ? done : 'done';
    $('fastest').disabled = done < total || !fastestStable();
    $('take').disabled = !chosen?.point;
  }

  /** Like best_stable of Python: the fastest with a margin above 0. */
  function fastestStable() {
    let best = null;
    for (const entry of computed()) {
      const [rate, margin] = entry.point;
      if (margin > 0 && (!best || rate > best.point[0])) best = entry;
    }
    return best;
  }

  function describe(entry) {
    const {change, point} = entry;
    const parts = [
      entry.family,
      `K ${change.max_staleness}`,
      `sync every ${change.sync_interval}`,
      `${change.samplers} samplers`,
      `batch ${change.batch}`,
      change.in_flight_update ? 'in flight' : 'samplers stop for syncs',
      change.correction === 'none' ? 'no correction' : change.correction,
    ];
    return `${number(point[0], 0)} tokens/s, margin ${number(point[1], 2)}: ` +
        parts.join(', ');
  }

  const SHAPES = [
    (x, y, r) => `<circle cx="${x}" cy="${y}" r="${r}"`,
    (x, y, r) => `<rect x="${x - r}" y="${y - r}" width="${2 * r}"
      height="${2 * r}"`,
    (x, y, r) => `<path d="M${x} ${y - 1.3 * r}L${x + 1.2 * r} ${y + r}H${
      x - 1.2 * r}z"`,
    (x, y, r) => `<path d="M${x} ${y - 1.4 * r}L${x + 1.4 * r} ${y}L${x} ${
      y + 1.4 * r}L${x - 1.4 * r} ${y}z"`,
  ];

  function drawPlane() {
    const area = $('plane');
    const width = area.clientWidth;
    if (!width) return;
    const height = width < 500 ? 330 : 400;
    const {tokens_per_second: rate} = state.result.events;
    const {margin} = state.result.outcome;
    const threshold = state.valid.drift_threshold;
    const points = cloud.filter((entry) => entry.point);
    const fastest = points.reduce((x, e) => Math.max(x, e.point[0]), rate);
    const low = -threshold / 2, high = threshold * 1.02;
    const {px, py, svg} = frame(
        width, height,
        {low: 0, high: fastest * 1.06 / 1000,
          label: 'throughput, thousand trained tokens/s'},
        {low, high, label: 'margin D* − max D, nats'});
    const spot = ([r, m]) => [px(r / 1000), py(Math.max(m, low))];
    const short = ([r, m]) => spot([r, m]).map((v) => v.toFixed(1));
    let body = `<rect class="unsafe" x="${LEFT}" y="${py(0)}"
      width="${width - LEFT - RIGHT}" height="${py(low) - py(0)}"/>${svg}
      <line class="limit" x1="${LEFT}" x2="${width - RIGHT}" y1="${py(0)}"
      y2="${py(0)}"/><text class="limit-text" x="${LEFT + 6}"
      y="${py(0) + 14}">below: drift crosses D*</text>
      <text x="${LEFT + 6}" y="${py(low) - 8}">on this edge: ${signed(low)}
      or less</text>`;
    for (const entry of points) {
      const [x, y] = spot(entry.point).map((v) => Number(v.toFixed(1)));
      const family = FAMILIES.indexOf(entry.family);
      const shape = SHAPES[family % SHAPES.length](x, y, 3.2);
      const old = entry.old ? 'old' : 'point';
      body += `${shape} class="${old} p${family}"/>`;
    }
    const fresh = computed();
    const front = simulator.paretoFront(
        fresh.map((e) => e.point[0]), fresh.map((e) => e.point[1]))
        .map((i) => fresh[i]).filter((e) => e.point[1] > low);
    const line = front.map((entry) => short(entry.point).join()).join(' ');
    body += `<polyline class="front" points="${line}"/>`;
    if (chosen?.point) {
      const [x, y] = short(chosen.point);
      body += `<circle class="chosen" cx="${x}" cy="${y}" r="8"/>`;
    }
    const [x, y] = spot([rate, margin]);
    const side = x > width * 0.7 ? ['end', -12] : ['start', 12];
    body += `<circle class="here" cx="${x}" cy="${y}" r="6"/>
      <text class="here-text" text-anchor="${side[0]}" x="${x + side[1]}"
      y="${y - 8}">this setting</text>`;
    const key = FAMILIES.map((family, i) =>
      `<span class="key"><svg width="14" height="14" aria-hidden="true">${
        SHAPES[i % SHAPES.length](7, 7, 4)} class="p${i}"/></svg> ${
        family}</span>`).join(' ');
    area.innerHTML = `<figcaption>${key}<span class="key"><svg width="22"
      height="8" aria-hidden="true"><polyline class="front"
      points="0,4 22,4"/></svg> front</span></figcaption>
      <svg role="img" viewBox="0 0 ${width} ${height}" height="${height}"
      aria-label="This setting: ${number(rate, 0)} tokens/s, margin
      ${number(margin, 2)} nats, among ${points.length} others">${body}</svg>`;
    area.spot = spot;
    showFront(front);
  }

  /** The front for a keyboard: a list, once all its points are known. */
  function showFront(front) {
    if (document.documentElement.dataset.cloud !== 'done') return;
    $('front').replaceChildren(
        element('option', {textContent: `${front.length} systems`}),
        ...front.map((entry) => element('option', {
          textContent: describe(entry), selected: entry === chosen,
        })));
    $('front').entries = front;
  }

  function choose(entry) {
    chosen = entry;
    showProgress();
    drawPlane();
  }

  function use(entry) {
    chosen = null;
    set({...state.valid, ...entry.change});
  }

  function buildPlane() {
    buildCloud();
    $('plane').addEventListener('click', (event) => {
      const svg = $('plane').querySelector('svg[role]');
      const box = svg.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      let nearest = null, distance = 20;
      for (const entry of cloud) {
        if (!entry.point) continue;
        const [a, b] = $('plane').spot(entry.point);
        const d = Math.hypot(a - x, b - y);
        if (d < distance) [nearest, distance] = [entry, d];
      }
      choose(nearest);
    });
    $('take').addEventListener('click', () => use(chosen));
    $('fastest').addEventListener('click', () => use(fastestStable()));
    $('front').addEventListener('change', () => {
      choose($('front').entries[$('front').selectedIndex - 1] || null);
    });
  }

  buildPlane();
  return {refresh: refreshCloud, draw: drawPlane};
}
