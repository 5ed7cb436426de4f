'use strict';

/*
 * The simulator of nvfp4_jax.rl.simulator for a browser, and for node.
 *
 * Ticks, lengths and counts are integers and follow the Python engine exactly:
 * Math.imul and >> where it multiplies and shifts int32. Everything else is a
 * double, where Python has float32; they agree to about 1e-6 until a collapse.
 * Names are those of Python, so that both read and write the same JSON.
 *
 * makeSimulator takes the numbers that Python wrote (experiments/
 * simulator_page/document.py): no constant of the model stands in this file.
 */
function makeSimulator(constants) {
  const DEFAULTS = constants.defaults;
  const CHOICES = constants.choices;
  const INTEGERS = new Set(constants.integers);
  const QUANTILES = Int32Array.from(constants.quantiles);
  const LONGEST = 2 ** 17;  // tokens of a response
  const INT32 = 2 ** 31;
  const MOST_GROUPS = 2 ** 20;  // about a second; they still sort exactly

  // 2^14 * 2^(i / 256)
  const EXP2 = Int32Array.from(
      {length: 256}, (_, i) => Math.floor(2 ** (14 + i / 256) + 0.5));

  // ---- settings ----------------------------------------------------

  class Refused extends Error {
    constructor(knob, message) {
      super(message);
      this.knob = knob;
    }
  }

  /** Throws Refused where SimulatorConfig would raise a ValueError. */
  function validate(cfg) {
    const check = (knob, fine, bounds) => {
      if (!fine) {
        throw new Refused(knob, `${knob} ${cfg[knob]} is not ${bounds}.`);
      }
    };
    for (const [knob, value] of Object.entries(DEFAULTS)) {
      const kind = typeof value;
      if (knob in CHOICES) {
        const values = CHOICES[knob].join(', ');
        check(knob, CHOICES[knob].includes(cfg[knob]), `in (${values})`);
      } else if (kind === 'boolean') {
        check(knob, typeof cfg[knob] === kind, 'true or false');
      } else {
        check(knob, Number.isFinite(cfg[knob]), 'a number');
        const whole = !INTEGERS.has(knob) || Number.isInteger(cfg[knob]);
        check(knob, whole, 'a whole number');
      }
    }
    for (const knob of constants.positive) check(knob, cfg[knob] > 0, 'above 0');
    for (const knob of constants.not_negative) check(knob, cfg[knob] >= 0, 'at least 0');
    const c = cfg;
    check('buffer_batches', c.buffer_batches >= 1, 'at least 1');
    const factor = c.shared_experts_factor;
    check('shared_experts_factor', factor > 0 && factor <= 1, 'in (0, 1]');
    check('tis_cap', c.tis_cap >= 1, 'at least 1');
    const share = c.last_layers_bf16;
    check('last_layers_bf16', share >= 0 && share <= 1, '0 to 1');
    check('drift_decay', c.drift_decay >= 0 && c.drift_decay < 1, '0 to 1');
    check('horizon', c.horizon <= LONGEST, `at most ${LONGEST}`);
    check('nvfp4_train_overhead', c.nvfp4_train_overhead < 1, 'below 1');
    if (c.sync_interval > c.max_staleness + 1) {
      throw new Refused(
          'sync_interval',
          `sync_interval ${c.sync_interval} is above max_staleness + 1 = ` +
          `${c.max_staleness + 1}: every group would be too old.`);
    }
  }

  /** Linear between points, constant outside of them. */
  function interpolate(x, points) {
    if (x <= points[0][0]) return points[0][1];
    for (let i = 1; i < points.length; i++) {
      const [x0, y0] = points[i - 1];
      const [x1, y1] = points[i];
      if (x <= x1) return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
    }
    return points[points.length - 1][1];
  }

  function quantizationMismatch(cfg) {
    const table = constants.mismatch[cfg.mismatch];
    const i = constants.precisions.indexOf(cfg.train);
    const j = constants.precisions.indexOf(cfg.rollout);
    let q = table[i][j];
    let floor = table[0][0];
    if (cfg.shared_quantizer && i === j) q = floor = 0;
    let factor = interpolate(cfg.last_layers_bf16, constants.last_layers);
    if (cfg.shared_experts_bf16) factor *= cfg.shared_experts_factor;
    const nvfp4 = cfg.train.includes('nvfp4') || cfg.rollout.includes('nvfp4');
    if (cfg.four_over_six && nvfp4) factor *= constants.four_over_six;
    const above = Math.sqrt(Math.max(q * q - floor * floor, 0));
    const kv = cfg.kv_fp8 ? constants.kv_fp8 : 0;
    return Math.sqrt(
        Math.min(q, floor) ** 2 + (above * factor) ** 2 + kv ** 2);
  }

  /** Returns how much faster than bf16 samplers and trainer are. */
  function speed(cfg) {
    const pflops = constants.pflops[cfg.hardware];
    const ratio = (p) => pflops[constants.multiplies[p]] / pflops[0];
    const lost = cfg.train === 'nvfp4_w4a4' ?
        cfg.nvfp4_train_overhead : constants.train_overhead[cfg.train];
    return [
      ratio(cfg.rollout) * (1 - constants.rollout_overhead[cfg.rollout]),
      ratio(cfg.train) * (1 - lost),
    ];
  }

  const round = (x) => Math.floor(x + 0.5);

  /** Returns {engine, drift}, the numbers that a simulation reads. */
  function knobs(cfg) {
    validate(cfg);
    const [rollout, train] = speed(cfg);
    const ticks = constants.ticks_per_second;
    const sigma = Math.sqrt(Math.log1p(cfg.length_cv ** 2));
    const median = Math.log(cfg.mean_length) - sigma ** 2 / 2;
    const engine = {
      samplers: cfg.samplers,
      batch: cfg.batch,
      buffer: round(cfg.buffer_batches * cfg.batch),
      max_staleness: cfg.max_staleness,
      sync_interval: cfg.sync_interval,
      sync_ticks: round(cfg.sync_latency * ticks),
      in_flight: Number(cfg.in_flight_update),
      log2_median: round(256 * median / Math.LN2),
      log2_sigma: round(256 * sigma / Math.LN2),
      horizon: cfg.horizon,
      token_ticks: round(256 * ticks / (cfg.sampler_speed * rollout)),
      environment_ticks: round(cfg.turns * cfg.environment_latency * ticks),
      train_ticks: round(2 ** 20 * ticks / (cfg.trainer_speed * train)),
      overhead_ticks: round(cfg.step_overhead * ticks),
    };
    const tokens = cfg.batch * cfg.group_size * cfg.horizon;
    const longest = {
      'A response': cfg.horizon * engine.token_ticks,
      "A batch's training": Math.floor(tokens / 256) * engine.train_ticks,
      'The run': typical(engine, cfg.group_size)[1] * cfg.steps * 2,
    };
    for (const [name, value] of Object.entries(longest)) {
      if (value >= INT32) {
        throw new Refused(
            'steps',
            `${name} is too long for int32 ticks (steps ${cfg.steps}, ` +
            `horizon ${cfg.horizon}, sampler_speed ${cfg.sampler_speed}, ` +
            `trainer_speed ${cfg.trainer_speed}): take fewer or shorter ones.`);
      }
    }
    const replay = cfg.routing_replay ? constants.routing_replay : 1;
    const noise = constants.backward_noise[cfg.backward];
    const drift = {
      quantization: quantizationMismatch(cfg),
      staleness: cfg.staleness,
      power: cfg.staleness_power,
      learning_rate: cfg.learning_rate / 1e-6,
      noise: cfg.train === 'bf16' ? 1 : noise,
      capacity: cfg.capacity * replay,
      bonus: constants.correction[cfg.correction],
      bound: cfg.correction === 'tis' ?
          Math.log(cfg.tis_cap) : constants.clip_eps,
      decay: cfg.drift_decay,
      gain: cfg.drift_gain,
      amplification: cfg.amplification,
      threshold: cfg.drift_threshold,
      learning: cfg.learning,
      damage: cfg.damage,
      reward_start: cfg.reward_start,
      reward_max: cfg.reward_max,
    };
    return {engine, drift};
  }

  /** Returns typical ticks of a group and of a step, to guess sizes. */
  function typical(engine, groupSize) {
    const z = QUANTILES[Math.floor(1024 * 0.5 ** (1 / groupSize))] / 1024;
    const median = engine.log2_median / 256;
    const sigma = engine.log2_sigma / 256;
    const cut = (log2) => Math.min(2 ** log2, engine.horizon);
    const longest = cut(median + sigma * z);
    const mean = cut(median + sigma ** 2 * Math.LN2 / 2);
    const group = longest * engine.token_ticks / 256 + engine.environment_ticks;
    const tokens = mean * groupSize * engine.batch;
    const work = engine.overhead_ticks + tokens * engine.train_ticks / 2 ** 20;
    const share = Math.max(
        engine.batch / engine.samplers, 1.4 / (engine.max_staleness + 1));
    const step = Math.max(work, group * share);
    return [group, step + engine.sync_ticks / engine.sync_interval];
  }

  // ---- event_engine ----------------------------------------------------

  /** Returns the 1024 lengths that are equally likely, in order. */
  function lengthTable(engine) {
    const table = new Int32Array(1024);
    for (let i = 0; i < 1024; i++) {
      const spread = (Math.imul(engine.log2_sigma, QUANTILES[i]) + 512) >> 10;
      const e = Math.min(Math.max(engine.log2_median + spread, 0), 17 * 256);
      const whole = e >> 8;
      const down = EXP2[e & 255] >> Math.max(14 - whole, 0);
      const length = down << Math.max(whole - 14, 0);
      table[i] = Math.min(Math.max(length, 1), engine.horizon);
    }
    return table;
  }

  /** Returns the first word of Threefry-2x32, 20 rounds, as an int32. */
  function threefry(key0, key1, count0, count1) {
    const key2 = key0 ^ key1 ^ 0x1bd11bda;
    let x = (count0 + key0) | 0;
    let y = (count1 + key1) | 0;
    // Four rounds and a key, five times; the rotations alternate.
    x = (x + y) | 0; y = ((y << 13) | (y >>> 19)) ^ x;
    x = (x + y) | 0; y = ((y << 15) | (y >>> 17)) ^ x;
    x = (x + y) | 0; y = ((y << 26) | (y >>> 6)) ^ x;
    x = (x + y) | 0; y = ((y << 6) | (y >>> 26)) ^ x;
    x = (x + key1) | 0; y = (y + key2 + 1) | 0;
    x = (x + y) | 0; y = ((y << 17) | (y >>> 15)) ^ x;
    x = (x + y) | 0; y = ((y << 29) | (y >>> 3)) ^ x;
    x = (x + y) | 0; y = ((y << 16) | (y >>> 16)) ^ x;
    x = (x + y) | 0; y = ((y << 24) | (y >>> 8)) ^ x;
    x = (x + key2) | 0; y = (y + key0 + 2) | 0;
    x = (x + y) | 0; y = ((y << 13) | (y >>> 19)) ^ x;
    x = (x + y) | 0; y = ((y << 15) | (y >>> 17)) ^ x;
    x = (x + y) | 0; y = ((y << 26) | (y >>> 6)) ^ x;
    x = (x + y) | 0; y = ((y << 6) | (y >>> 26)) ^ x;
    x = (x + key0) | 0; y = (y + key1 + 3) | 0;
    x = (x + y) | 0; y = ((y << 17) | (y >>> 15)) ^ x;
    x = (x + y) | 0; y = ((y << 29) | (y >>> 3)) ^ x;
    x = (x + y) | 0; y = ((y << 16) | (y >>> 16)) ^ x;
    x = (x + y) | 0; y = ((y << 24) | (y >>> 8)) ^ x;
    x = (x + key1) | 0; y = (y + key2 + 4) | 0;
    x = (x + y) | 0; y = ((y << 13) | (y >>> 19)) ^ x;
    x = (x + y) | 0; y = ((y << 15) | (y >>> 17)) ^ x;
    x = (x + y) | 0; y = ((y << 26) | (y >>> 6)) ^ x;
    x = (x + y) | 0; y = ((y << 6) | (y >>> 26)) ^ x;
    return (x + key2) | 0;
  }

  /**
   * Returns groups in the order of finishing, on the sampler clock; a slot has
   * `perSlot` of them. Later than `knownUntil` the list is not whole.
   */
  function drawGroups(engine, key, perSlot, steps, groupSize) {
    const synchronous = engine.max_staleness === 0;
    // Rule 5: slots that have no group in a round do nothing.
    const slots = synchronous ?
        Math.min(engine.samplers, engine.batch) : engine.samplers;
    const size = slots * perSlot;
    const table = lengthTable(engine);
    const words = Math.ceil(groupSize / 3);
    const duration = new Int32Array(size);
    const allTokens = new Int32Array(size);
    for (let slot = 0, name = 0; slot < slots; slot++) {
      for (let j = 0; j < perSlot; j++, name++) {
        let longest = 0;
        let sum = 0;
        let left = groupSize;
        for (let w = 0; w < words; w++) {
          let x = threefry(key[0], key[1], slot, j * words + w);
          for (let r = Math.min(left, 3); r > 0; r--, left--) {
            const length = table[x & 1023];
            if (length > longest) longest = length;
            sum += length;
            x >>>= 10;
          }
        }
        const generation = Math.imul(longest, engine.token_ticks) >> 8;
        duration[name] = Math.max(generation + engine.environment_ticks, 1);
        allTokens[name] = sum;
      }
    }
    // Finish time and name in one double: sorting it keeps the smaller slot
    // first, as a stable sort would.
    const order = new Float64Array(size);
    let knownUntil = Infinity;
    let count = 0;
    if (synchronous) {
      let opens = 0;
      for (let round = 0; round < steps; round++) {
        let closes = opens;
        for (let slot = 0; slot < slots; slot++) {
          const q = Math.floor(
              (engine.batch - slot + engine.samplers - 1) / engine.samplers);
          let finish = opens;
          for (let i = round * q; i < (round + 1) * q; i++) {
            const name = slot * perSlot + i;
            finish += duration[name];
            order[count++] = finish * size + name;
          }
          closes = Math.max(closes, finish);
        }
        opens = closes;
      }
    } else {
      for (let slot = 0; slot < slots; slot++) {
        let finish = 0;
        for (let name = slot * perSlot; name < (slot + 1) * perSlot; name++) {
          finish += duration[name];
          order[count++] = finish * size + name;
        }
        knownUntil = Math.min(knownUntil, finish);
      }
    }
    const sorted = order.subarray(0, count).sort();
    const finish = new Float64Array(count);
    const start = new Float64Array(count);
    const tokens = new Int32Array(count);
    for (let i = 0; i < count; i++) {
      finish[i] = Math.floor(sorted[i] / size);
      const name = sorted[i] - finish[i] * size;
      start[i] = finish[i] - duration[name];
      tokens[i] = allTokens[name];
    }
    return {finish, start, tokens, knownUntil};
  }

  /** Returns what every step did, or null if the groups did not suffice. */
  function runSteps(engine, groups, steps) {
    const {finish, start, tokens, knownUntil} = groups;
    const {batch, buffer, sync_interval: interval} = engine;
    const synchronous = engine.max_staleness === 0;
    const history = Math.floor(engine.max_staleness / interval) + 1;
    const syncs = new Float64Array(history).fill(-1);  // newest first
    const taken = new Int32Array(batch);
    const histogram = new Int32Array(history + 1);
    const out = {};
    for (const name of STEP_FIELDS) out[name] = new Float64Array(steps);
    let end = 0, ready = 0, pause = 0, since = 0;
    let arrived = 0, hopeless = 0;  // both clocks only go forward
    for (let k = 0; k < steps; k++) {
      const allowed = Math.floor((engine.max_staleness - since) / interval);
      const threshold = syncs[Math.min(allowed, history - 1)];
      const clock = ready - pause;
      while (arrived < finish.length && finish[arrived] <= clock) arrived++;
      while (hopeless < finish.length && finish[hopeless] <= threshold) {
        hopeless++;
      }
      const look = Math.max(end, arrived - buffer);
      let at = Math.max(look, hopeless);
      let trained = 0;
      for (let count = 0; count < batch; at++) {
        if (at >= finish.length) return null;
        if (start[at] < threshold) continue;
        taken[count++] = at;
        trained += tokens[at];
      }
      const take = Math.max(clock, finish[at - 1]);
      if (take > knownUntil) return null;
      const work = engine.overhead_ticks +
          (Math.imul(trained >> 8, engine.train_ticks) >> 12);
      const done = take + pause + work;
      const isSync = since + 1 === interval;
      const stands = isSync && (synchronous || !engine.in_flight);
      const resume = done + (stands ? engine.sync_ticks : 0);
      let arrives = done - pause + (stands ? 0 : engine.sync_ticks);
      let idle = stands ? engine.sync_ticks : 0;
      if (synchronous) {
        arrives = take;
        idle = resume - take - pause;
      }

      // Lags: how many syncs came after a group had started, and, in flight,
      // which share of its tokens was older than each of them.
      histogram.fill(0);
      let passed = 0, old = 0, busy = 0;
      for (let i = 0; i < batch; i++) {
        const group = taken[i];
        const from = start[group];
        const time = finish[group] - from;
        let behind = 0, share = 0;
        while (behind < history && from < syncs[behind]) {
          const before = (syncs[behind] - from) / time;
          share += engine.in_flight ? Math.min(before, 1) : 1;
          behind++;
        }
        histogram[behind]++;
        passed += behind;
        old += share * tokens[group];
        busy += time;
      }
      let largest = history;
      while (largest > 0 && !histogram[largest]) largest--;
      let p95 = largest;
      for (let above = 0; p95 > 0; p95--) {
        above += histogram[p95];
        if (20 * above > batch) break;
      }

      const wall = Math.max(resume - ready, 1);
      out.look[k] = look;
      out.end[k] = at;
      out.finished[k] = Math.max(arrived, at);
      out.ready[k] = ready;
      out.take[k] = take + pause;
      out.done[k] = done;
      out.resume[k] = resume;
      out.pause[k] = pause;
      out.tokens[k] = trained;
      out.evicted[k] = look - end;
      out.stale[k] = at - look - batch;
      out.lag_mean[k] = since + interval * passed / batch;
      out.token_lag[k] = since + interval * old / trained;
      out.lag_p95[k] = since + interval * p95;
      out.lag_max[k] = since + interval * largest;
      out.sampler_utilization[k] = synchronous ?
          busy / (engine.samplers * wall) : 1 - idle / wall;
      out.trainer_utilization[k] = work / wall;

      end = at;
      ready = resume;
      pause += idle;
      if (isSync) {
        syncs.copyWithin(1, 0, history - 1);
        syncs[0] = arrives;
      }
      since = isSync ? 0 : since + 1;
    }
    return out;
  }

  const STEP_FIELDS = [
    'look', 'end', 'finished', 'ready', 'take', 'done', 'resume', 'pause',
    'tokens', 'evicted', 'stale', 'lag_mean', 'token_lag', 'lag_p95',
    'lag_max', 'sampler_utilization', 'trainer_utilization',
  ];

  /**
   * Returns the events of an engine: per step, and over the whole run. It
   * refuses what takes more groups than `most`, where Python takes its time.
   */
  function runEngine(engine, seed, steps, groupSize, most = MOST_GROUPS) {
    const slots = engine.samplers;
    let perSlot = Math.ceil(engine.batch / slots) * steps;
    if (engine.max_staleness > 0) {
      const [group, step] = typical(engine, groupSize);
      const guess = step * steps / group;
      perSlot = Math.ceil(guess + 1.25 * Math.sqrt(guess) + 1);
    }
    const key = [0, seed | 0];  // jax.random.key(seed)
    for (;; perSlot *= 2) {
      const active =
          engine.max_staleness ? slots : Math.min(slots, engine.batch);
      if (perSlot * active > most) {
        throw new Refused(
            'steps', `steps ${steps} of this system need more than ` +
            `${most} groups, too many for a page: take fewer.`);
      }
      const groups = drawGroups(engine, key, perSlot, steps, groupSize);
      const events = runSteps(engine, groups, steps);
      if (events) return {steps: events, ...totals(events, steps)};
    }
  }

  function totals(events, steps) {
    const last = steps - 1;
    const total = events.resume[last];
    const seconds = total / constants.ticks_per_second;
    let tokens = 0, dropped = 0, lag = 0, sampler = 0, trainer = 0;
    for (let k = 0; k < steps; k++) {
      const wall = events.resume[k] - events.ready[k];
      tokens += events.tokens[k];
      dropped += events.evicted[k] + events.stale[k];
      lag += events.lag_mean[k];
      sampler += events.sampler_utilization[k] * wall;
      trainer += events.trainer_utilization[k] * wall;
    }
    return {
      steps_per_hour: 3600 * steps / seconds,
      tokens_per_second: tokens / seconds,
      sampler_utilization: sampler / total,
      trainer_utilization: trainer / total,
      lag_mean: lag / steps,
      dropped_fraction: dropped / events.finished[last],
    };
  }

  // ---- drift_model -----------------------------------------------------

  const CURVES =
      ['stale', 'mismatch', 'drift', 'reward', 'clip_fraction', 'grad_norm'];

  /** Returns what the lags of the steps do to the policy. */
  function follow(model, lags) {
    const curves = {};
    for (const name of CURVES) curves[name] = new Float64Array(lags.length);
    let drift = 0;
    let reward = model.reward_start;
    const rate = model.learning * model.learning_rate;
    for (let k = 0; k < lags.length; k++) {
      const s = model.staleness * model.learning_rate * lags[k] ** model.power;
      const m = Math.sqrt(s * s + model.quantization ** 2);
      const guarded = Math.max(m, 1e-6);
      const load = m * drift;
      const inside = 1 - Math.exp(-model.bound / guarded);
      const c = model.capacity * (1 + model.bonus * inside);
      curves.grad_norm[k] = model.noise * Math.sqrt(1 + (load / c) ** 2);
      drift = Math.min(
          model.decay * drift + model.gain * model.noise * m +
          model.amplification * Math.max(load - c, 0),
          constants.drift_limit);
      const gain =
          rate * (model.reward_max - reward) * Math.exp(-m * m / (2 * c * c));
      const loss = model.damage * Math.max(drift - model.threshold, 0) * reward;
      reward = Math.max(reward + gain - loss, 0);
      curves.stale[k] = s;
      curves.mismatch[k] = m;
      curves.drift[k] = drift;
      curves.reward[k] = reward;
      curves.clip_fraction[k] = Math.exp(-constants.clip_eps / guarded);
    }
    return curves;
  }

  /** Returns the first step below half of the best reward so far, or -1. */
  function collapseStep(reward) {
    let best = -Infinity;
    for (let k = 0; k < reward.length; k++) {
      best = Math.max(best, reward[k]);
      if (reward[k] < 0.5 * best) return k;
    }
    return -1;
  }

  // ---- simulator -----------------------------------------------------------

  function runDrift(model, lags) {
    const curves = follow(model, lags);
    const maxDrift = curves.drift.reduce((x, y) => Math.max(x, y));
    return {
      curves,
      quantization: model.quantization,
      stale: curves.stale.reduce((x, y) => x + y) / lags.length,
      max_drift: maxDrift,
      margin: model.threshold - maxDrift,
      final_reward: curves.reward[lags.length - 1],
      collapse: collapseStep(curves.reward),
    };
  }

  /** Returns {events, outcome} of a configuration. */
  function simulate(cfg, seed) {
    const {engine, drift} = knobs(cfg);
    const events = runEngine(engine, seed, cfg.steps, cfg.group_size);
    return {events, outcome: runDrift(drift, events.steps.token_lag)};
  }

  /** Returns indices that no other point beats in both, by throughput. */
  function paretoFront(throughput, margin) {
    const order = Array.from(throughput.keys()).sort((a, b) =>
      throughput[b] - throughput[a] || margin[b] - margin[a] || a - b);
    let best = -Infinity;
    const front = [];
    for (const i of order) {
      if (margin[i] <= best) continue;
      best = margin[i];
      front.push(i);
    }
    return front.reverse();
  }

  return {
    validate, knobs, runEngine, runDrift, simulate, paretoFront, threefry,
  };
}

if (typeof module !== 'undefined') module.exports = makeSimulator;
