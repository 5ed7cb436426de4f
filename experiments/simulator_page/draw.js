'use strict';

/* What charts and knobs share: elements, numbers as text, axes. */
const draw = (() => {
  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  const number = (x, digits) => x.toLocaleString('en', {
    minimumFractionDigits: digits, maximumFractionDigits: digits,
  }).replace('-', '−');
  const signed = (x) => String(x).replace('-', '−');

  const LEFT = 54, RIGHT = 15, TOP = 8, BOTTOM = 32;

  /** Returns round values from low to high, about `count` of them. */
  function ticks(low, high, count) {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].find((f) => f * power >= raw) * power;
    const values = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9);
      i++) values.push(Number((i * step).toPrecision(12)));
    return values;
  }

  /** Returns the scales of a chart and the SVG of its axes. */
  function frame(width, height, x, y) {
    const scale = (low, high, from, to) => (v) =>
      from + (v - low) / (high - low) * (to - from);
    const px = scale(x.low, x.high, LEFT, width - RIGHT);
    const py = scale(y.low, y.high, height - BOTTOM, TOP);
    let svg = '';
    for (const v of ticks(y.low, y.high, height / 45)) {
      svg += `<line class="grid" x1="${LEFT}" x2="${width - RIGHT}"
        y1="${py(v)}" y2="${py(v)}"/><text x="${LEFT - 5}" y="${py(v) + 4}"
        text-anchor="end">${signed(v)}</text>`;
    }
    for (const v of ticks(x.low, x.high, width / 80)) {
      svg += `<text x="${px(v)}" y="${height - BOTTOM + 14}"
        text-anchor="middle">${v}</text>`;
    }
    const middle = TOP + (height - BOTTOM - TOP) / 2;
    svg += `<line class="axis" x1="${LEFT}" x2="${width - RIGHT}"
      y1="${height - BOTTOM}" y2="${height - BOTTOM}"/>
      <text x="${(LEFT + width - RIGHT) / 2}" y="${height - 4}"
      text-anchor="middle">${x.label}</text>
      <text transform="translate(10 ${middle}) rotate(-90)"
      text-anchor="middle">${y.label}</text>`;
    return {px, py, svg};
  }

  return {element, number, signed, frame, LEFT, RIGHT, TOP, BOTTOM};
})();
