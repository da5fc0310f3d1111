// Lines over time and bars, drawn as SVG. Each is an image with a name; the same figures stand in a table.

import { duration, element, shape } from "./dom.js";

const HEIGHT = 180;
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 10, 10, 24];

/**
 * Return a chart and its legend.
 *
 * `series`: each with `name`, `kind` (a class) and `points` of [seconds after the start, value or null for a gap].
 * `span`: seconds shown, up to `now`. `top`: the highest value of the axis. `text`: writes a value.
 */
export function lines({ name, summary, series, now, span, top, text, width }) {
  const x = (seconds) => LEFT + (width - LEFT - RIGHT) * (1 - (now - seconds) / span);
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (top ? value / top : 0);
  const grid = [0, 0.5, 1].map((part) => [
    shape("line", { class: part ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: y(part * top), y2: y(part * top) }),
    shape("text", { x: LEFT - 6, y: y(part * top) + 4, "text-anchor": "end" }, text(part * top)),
  ]);
  const ticks = [1, 0.5, 0].map((part) => shape("text", {
    x: x(now - part * span), y: HEIGHT - 6, "text-anchor": part === 1 ? "start" : part ? "middle" : "end",
  }, part ? `${duration(part * span)} ago` : "now"));
  const paths = series.map(({ kind, points }) => shape("path", { class: `series ${kind}`, d: path(points, x, y) }));
  return [
    shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": `${name}. ${summary}` },
      grid, ticks, paths),
    element("ul", { class: "legend" }, series.map((each) => element("li", {},
      shape("svg", { class: "swatch", viewBox: "0 0 24 12", "aria-hidden": "true" },
        shape("path", { class: `series ${each.kind}`, d: "M0 6H24" })), each.name))),
  ];
}

function path(points, x, y) {
  let [drawn, gap] = ["", true];
  for (const [seconds, value] of points) {
    const place = value === null ? "" : `${x(seconds).toFixed(1)} ${y(value).toFixed(1)}`;
    if (place) drawn += gap ? `M${place}L${place}` : `L${place}`; // a value between two gaps is a dot
    gap = !place;
  }
  return drawn;
}

/** Return a bar of parts, each with `kind` (a class) and `value`, out of a whole. What it says stands beside it. */
export function bar(parts, whole) {
  let from = 0;
  const pieces = parts.filter(({ value }) => value > 0).map(({ kind, value }) => {
    const piece = shape("rect", { class: kind, x: from, y: 0, width: Math.min(100 - from, (100 * value) / whole), height: 8 });
    from = Math.min(100, from + (100 * value) / whole);
    return piece;
  });
  return shape("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    shape("rect", { class: "whole", x: 0, y: 0, width: 100, height: 8 }), pieces);
}
