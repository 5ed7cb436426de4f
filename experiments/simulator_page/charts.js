'use strict';

/* The curves by update. state: {valid, result}, of page.js. */
function makeCharts(area, state) {
  const {element, number, frame, LEFT, RIGHT, TOP, BOTTOM} = draw;
  let cursor = -1;  // update under the pointer

  const CHARTS = [
    {
      title: 'Reward', unit: 'reward', digits: 3, bottom: 0,
      top: ({cfg}) => Math.max(cfg.reward_max, cfg.reward_start) * 1.05,
      series: [['reward', 'reward', ({curves}) => curves.reward]],
    },
    {
      title: 'Drift D', unit: 'drift, nats', digits: 3, bottom: 0,
      top: ({cfg}) => 2 * cfg.drift_threshold, cut: true,
      limit: ({cfg}) => [cfg.drift_threshold, 'D*: above it reward suffers'],
      series: [['drift', 'drift', ({curves}) => curves.drift]],
    },
    {
      title: 'Mismatch |Δ log p|', unit: 'nats per token', digits: 4,
      bottom: 0,
      series: [
        ['mismatch', 'both m', ({curves}) => curves.mismatch],
        ['stale', 'stale s', ({curves}) => curves.stale],
        ['quantization', 'quantized q', ({curves, outcome}) =>
          curves.stale.map(() => outcome.quantization)],
      ],
    },
    {
      title: 'Utilization', unit: 'busy, %', digits: 1, bottom: 0,
      top: () => 102,
      series: [
        ['sampler_utilization', 'samplers', ({steps}) =>
          steps.sampler_utilization.map((x) => 100 * x)],
        ['trainer_utilization', 'trainer', ({steps}) =>
          steps.trainer_utilization.map((x) => 100 * x)],
      ],
    },
    {
      title: 'Lag of the trained groups', unit: 'updates', digits: 2,
      bottom: 0, least: 1,
      series: [
        ['lag_mean', 'mean', ({steps}) => steps.lag_mean],
        ['lag_p95', '95 %', ({steps}) => steps.lag_p95],
        ['lag_max', 'largest', ({steps}) => steps.lag_max],
      ],
    },
    {
      title: 'Clipped tokens', unit: 'tokens, %', digits: 2, bottom: 0,
      least: 1,
      series: [['clip_fraction', 'outside 1 ± 0.2', ({curves}) =>
        curves.clip_fraction.map((x) => 100 * x)]],
    },
  ];

  function buildCharts() {
    for (const chart of CHARTS) {
      chart.caption = element('figcaption');
      chart.area = element('div', {className: 'chart'});
      area.append(element('figure', {}, chart.caption, chart.area));
      const move = (event) => {
        const box = chart.area.getBoundingClientRect();
        const share = (event.clientX - box.left - LEFT) /
            (box.width - LEFT - RIGHT);
        const at = Math.round(share * state.valid.steps);
        setCursor(at >= 0 && at < state.valid.steps ? at : -1);
      };
      chart.area.addEventListener('pointermove', move);
      chart.area.addEventListener('pointerdown', move);
      chart.area.addEventListener('pointerleave', () => setCursor(-1));
    }
  }

  function setCursor(at) {
    if (at === cursor) return;
    cursor = at;
    requestAnimationFrame(drawCharts);
  }

  function drawCharts() {
    const {events, outcome} = state.result;
    const cfg = state.valid;
    const all = {
      cfg, outcome, steps: events.steps, curves: outcome.curves,
    };
    const at = cursor < 0 ? cfg.steps - 1 : cursor;
    for (const chart of CHARTS) {
      const width = chart.area.clientWidth;
      if (!width) continue;
      const height = 168;
      const lines = chart.series.map(([name, label, values]) =>
        ({name, label, values: values(all)}));
      const largest = lines.reduce((top, {values}) =>
        values.reduce((x, y) => Math.max(x, y), top), chart.least || 1e-3);
      const high = chart.top ? chart.top(all) : largest * 1.08;
      const {px, py, svg} = frame(
          width, height,
          {low: 0, high: cfg.steps, label: 'update'},
          {low: chart.bottom, high, label: chart.unit});
      let body = svg;
      if (outcome.collapse >= 0) {
        const x = px(outcome.collapse);
        body += `<line class="limit" x1="${x}" x2="${x}" y1="${TOP}"
          y2="${height - BOTTOM}"/>`;
      }
      if (chart.limit) {
        const [value, text] = chart.limit(all);
        body += `<line class="limit" x1="${LEFT}" x2="${width - RIGHT}"
          y1="${py(value)}" y2="${py(value)}"/><text class="limit-text"
          x="${width - RIGHT}" y="${py(value) - 5}"
          text-anchor="end">${text}</text>`;
      }
      lines.forEach(({values}, i) => {
        let points = '';
        values.forEach((v, k) => {
          points += `${px(k).toFixed(1)},${py(Math.min(v, high)).toFixed(1)} `;
        });
        body += `<polyline class="s${i}" points="${points}"/>`;
      });
      if (cursor >= 0) {
        const x = px(cursor);
        body += `<line class="cursor" x1="${x}" x2="${x}" y1="${TOP}"
          y2="${height - BOTTOM}"/>`;
      }
      const key = lines.map(({label, values}, i) =>
        `<span class="key"><svg width="22" height="8" aria-hidden="true"
        ><polyline class="s${i}" points="0,4 22,4"/></svg> ${label}
        ${number(values[at], chart.digits)}</span>`).join('');
      const where = cursor < 0 ? 'at the end' : `at update ${at}`;
      const beyond = chart.cut && largest > high ? ', cut above' : '';
      const ends = lines.map(({label, values}) =>
        `${label} ${number(values[cfg.steps - 1], chart.digits)}`);
      chart.caption.innerHTML =
          `<strong>${chart.title}</strong>${key}
          <span class="unit">${where}${beyond}</span>`;
      chart.area.innerHTML = `<svg role="img" viewBox="0 0 ${width} ${height}"
        height="${height}" aria-label="${chart.title} by update, at the end:
        ${ends.join(', ')}, in ${chart.unit}">${body}</svg>`;
    }
  }

  buildCharts();
  return {draw: drawCharts};
}
