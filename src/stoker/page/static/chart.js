// Curves: one metric of one or more runs. The server gives means, minima and maxima of buckets; a zoom first stretches
// what is there, at once, and then asks the server for finer buckets.
import { get, isReport, runPath } from "./api.js";
import { Term, inUnit, nameOf, termOf, unitOf } from "./glossary.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { number, t, ticks } from "./i18n.js";
import { runName } from "./run_list.js";
import { Problem } from "./ui.js";

export const POINTS = 800; // buckets asked for
const LAST_TICK = 32; // px for the right half of the last number below a curve
const WAIT = 180; // ms after the last zoom before the server is asked
const COLOURS = 6;
export const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((n) => n * 10 ** power)).flat(); // between ticks of steps and tokens
export const UNKNOWN = [0, Infinity]; // bounds of x before a view without a zoom was drawn

/** The library that draws; asked for early it is there when the first numbers are. */
export const drawing = () => import("./vendor/uplot.mjs");

/** Exponential smoothing that begins unbiased: Adam's correction (Kingma and Ba, 2015, algorithm 1). */
export function smoothed(values, weight) {
  if (!weight) return values;
  let [sum, left] = [0, 1];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    left *= weight;
    sum = weight * sum + (1 - weight) * value;
    return sum / (1 - left);
  });
}

/** Curves with x of their own on one x: {x, columns}, with null where a curve has no point. */
export function merged(curves) {
  if (curves.length === 1) return { x: curves[0].x, columns: curves.map((curve) => curve.columns) };
  const x = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const place = new Map(x.map((value, i) => [value, i]));
  const columns = curves.map((curve) =>
    curve.columns.map((column) => {
      const wide = new Array(x.length).fill(null);
      curve.x.forEach((value, i) => (wide[place.get(value)] = column[i]));
      return wide;
    }),
  );
  return { x, columns };
}

/** A zoom about a point: `factor` below 1 goes in; stays within the bounds. */
export function zoomed([from, to], [least, most], centre, factor) {
  const width = Math.min(Math.min(to - from, most - least) * factor, most - least); // a new plot may show more than there is
  const share = to > from ? (centre - from) / (to - from) : 0.5;
  const start = Math.min(Math.max(centre - share * width, least), most - width);
  return [start, start + width];
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const waiting = new Map(); // questions of this moment, by run and window

/** The answer about a metric; questions of one moment about a run are asked as one. */
export function curvesOf(run, { key, ...window }) {
  const path = `${runPath(run)}/metrics`;
  const name = JSON.stringify([path, window]);
  if (!waiting.has(name)) {
    const all = new Set();
    const answer = Promise.resolve().then(() => {
      waiting.delete(name);
      return get(path, { key: [...all], ...window });
    });
    waiting.set(name, { all, answer });
  }
  waiting.get(name).all.add(key);
  return waiting.get(name).answer;
}

/** Data of one metric for several runs, asked again when the range changes or `tick` does. */
function useCurves(runs, metric, axis, range, tick) {
  const [state, set] = useState({ curves: [], error: null });
  const ask = useRef(() => {});
  const key = runs.map((run) => run.id).join(",");
  useEffect(() => {
    const stop = new AbortController();
    const query = { key: metric, axis, points: POINTS, from: range?.[0], to: range?.[1] };
    let [isOpen, isWanted] = [false, false];
    ask.current = async () => {
      isWanted = isOpen;
      if (isOpen) return;
      isOpen = true;
      try {
        const answers = await Promise.all(runs.map((run) => curvesOf(run.id, query)));
        if (stop.signal.aborted) return;
        set({ curves: answers.map((answer, i) => ({ run: runs[i], ...answer })), error: null });
      } catch (error) {
        if (!stop.signal.aborted) set((old) => ({ ...old, error }));
      }
      isOpen = false;
      if (isWanted && !stop.signal.aborted) ask.current();
    };
    ask.current();
    return () => stop.abort();
  }, [key, metric, axis, range?.[0], range?.[1]]);
  useEffect(() => {
    if (tick) ask.current();
  }, [tick]);
  return state;
}

const APART = 12; // px: marks of what is in order that are closer on average do not cross the curve
const SHORT = 6; // px, the height of those marks

/** Marks at pixels between two others: [pixel, event, whether it crosses the curve]. Those of one pixel and kind are drawn once. */
export function placed(events, toPixel, from, to, ratio = 1) {
  const found = new Map();
  for (const event of events) {
    const x = Math.round(toPixel(event.step));
    if (x >= from && x <= to) found.set(`${x} ${event.level}`, [x, event]);
  }
  const all = [...found.values()];
  const isDense = all.filter(([, { level }]) => level === "ok").length * APART * ratio > to - from;
  return all.map(([x, event]) => [x, event, event.level !== "ok" || !isDense]);
}

/** Lines where something happened, and the rank of each kind's line style. */
function marks(events, axis) {
  return {
    hooks: {
      draw: (plot) => {
        if (axis !== "step") return;
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.lineWidth = devicePixelRatio;
        const strokes = { ok: colour("--soft"), warn: colour("--warn"), bad: colour("--bad") };
        const end = bbox.top + bbox.height;
        for (const [x, { level }, crosses] of placed(events, (step) => plot.valToPos(step, "x", true), bbox.left, bbox.left + bbox.width, devicePixelRatio)) {
          ctx.strokeStyle = strokes[level];
          ctx.setLineDash(level === "ok" && crosses ? [2, 6] : []);
          ctx.beginPath();
          ctx.moveTo(x, crosses ? bbox.top : end - SHORT * devicePixelRatio);
          ctx.lineTo(x, end);
          ctx.stroke();
        }
        ctx.restore();
      },
    },
  };
}

const PADDING = 0.1; // of the range of values, on each side of them

/** The range of an axis for values from `least` to `most`, which are null without values: 0 to 1 for zeros alone, else that of `pad`. */
export function rangeOfValues(least, most, pad) {
  if (least === null) return [null, null];
  return least === 0 && most === 0 ? [0, 1] : pad(least, most, PADDING, true);
}

/** Draws once and keeps the plot; new data replaces the old without a new plot. */
function Plot({ curves, metric, term, axis, log, smooth, events, range, onRange, label }) {
  const box = useRef(null);
  const plot = useRef(null);
  const bounds = useRef(UNKNOWN);
  const later = useRef(0);
  const mine = useRef(false); // whether a scale is being set by the code here
  const latest = useRef({});
  const [failed, fail] = useState(null); // the library did not come
  const data = toData(curves, metric, smooth);
  latest.current = { onRange, data, range };
  const shape = `${curves.map((curve) => curve.run.id).join(",")}|${metric}|${axis}|${log}|${document.documentElement.dataset.theme}|${data.length}`;

  const ask = () => {
    clearTimeout(later.current);
    later.current = setTimeout(() => {
      const { min, max } = plot.current.scales.x; // not before: the library sets a scale after this call
      latest.current.onRange([min, max]);
    }, WAIT);
  };
  const setRange = (next) => {
    mine.current = true;
    plot.current.setScale("x", { min: next[0], max: next[1] });
    mine.current = false;
    ask();
  };
  useEffect(() => {
    let stopped = false;
    let observer = null;
    drawing().then(({ default: uPlot }) => {
      if (stopped || !box.current) return;
      const series = [{ label: t(`axis.${axis}`) }];
      const bands = [];
      curves.forEach((curve, i) => {
        const stroke = colour(`--series-${i % COLOURS}`);
        const at = series.length;
        series.push({ label: runName(curve.run), stroke, width: 1.5, spanGaps: true, points: { show: curve.x.length < 3 } });
        series.push({ stroke: "transparent", spanGaps: true, points: { show: false } });
        series.push({ stroke: "transparent", spanGaps: true, points: { show: false } });
        bands.push({ series: [at + 2, at + 1], fill: `${stroke}2b` });
      });
      const ink = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
      const font = `12px ${colour("--font")}`;
      plot.current = new uPlot(
        {
          width: box.current.clientWidth || 480,
          height: 220,
          padding: [null, LAST_TICK, null, null],
          legend: { show: false },
          cursor: { drag: { x: true, y: false, setScale: true }, points: { size: 6 } },
          scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, least, most) => rangeOfValues(least, most, uPlot.rangeNum) } },
          axes: [
            { ...ink, font, ...(axis === "seconds" ? {} : { incrs: WHOLE }), values: (_, all, axis_, space, step) => ticks(all, step) },
            { ...ink, font, size: 64, values: (_, all, axis_, space, step) => (log ? all.map((value) => (value === null ? "" : inUnit(term, value, 3))) : ticks(all, step, unitOf(term) === "%")) },
          ],
          series,
          bands,
          plugins: [marks(events, axis)],
          hooks: { setSelect: [() => setTimeout(ask)] },
        },
        latest.current.data,
        box.current,
      );
      const shown = latest.current.range;
      if (shown) plot.current.setScale("x", { min: shown[0], max: shown[1] });
      plot.current.over.addEventListener("dblclick", () => latest.current.onRange(null));
      observer = new ResizeObserver(() => box.current && plot.current?.setSize({ width: box.current.clientWidth, height: 220 }));
      observer.observe(box.current);
      bounds.current = whole(latest.current.data, bounds.current, range);
    }, fail);
    return () => {
      stopped = true;
      clearTimeout(later.current);
      observer?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, events.length]);
  useEffect(() => {
    if (!plot.current) return;
    plot.current.setData(data, !range);
    bounds.current = whole(data, bounds.current, range);
    if (range) plot.current.setScale("x", { min: range[0], max: range[1] });
  }, [data[0], smooth, range?.[0], range?.[1]]);
  const wheel = (event) => {
    if (!plot.current || !(event.ctrlKey || event.shiftKey || event.altKey || document.activeElement === box.current)) return;
    event.preventDefault();
    const left = event.clientX - plot.current.over.getBoundingClientRect().left;
    const { min, max } = plot.current.scales.x;
    setRange(zoomed([min, max], bounds.current, plot.current.posToVal(left, "x"), event.deltaY < 0 ? 0.85 : 1 / 0.85));
  };
  const key = (event) => {
    if (!plot.current) return;
    const { min, max } = plot.current.scales.x;
    const width = max - min;
    const centre = (min + max) / 2;
    const moves = { "+": [centre, 0.7], "=": [centre, 0.7], "-": [centre, 1 / 0.7], ArrowLeft: [null, -0.2], ArrowRight: [null, 0.2] };
    if (event.key === "Escape" || event.key === "0") return latest.current.onRange(null);
    const move = moves[event.key];
    if (!move) return undefined;
    event.preventDefault();
    if (move[0] !== null) return setRange(zoomed([min, max], bounds.current, move[0], move[1]));
    return setRange(zoomed([min + move[1] * width, max + move[1] * width], bounds.current, centre + move[1] * width, 1));
  };
  useEffect(() => {
    const node = box.current;
    node.addEventListener("wheel", wheel, { passive: false });
    return () => node.removeEventListener("wheel", wheel);
  }, []);
  return html`<${Problem} error=${failed} /><div class="plot" ref=${box} tabindex="0" role="group" aria-label=${label} onKeyDown=${key}></div>`;
}

/** The widest x that was seen; of a zoomed view the earlier bounds stay. */
const whole = (data, before, range) => (range && before[1] > before[0] ? before : data[0].length ? [data[0][0], data[0][data[0].length - 1]] : before);

function toData(curves, metric, smooth) {
  const each = curves.map((curve) => {
    const { mean = [], min = [], max = [] } = curve.series[metric] ?? {};
    return { x: curve.x, columns: [smoothed(mean, smooth), min, max] };
  });
  if (!each.length) return [[]];
  const { x, columns } = merged(each);
  return [x, ...columns.flat()];
}

/**
 * A curve with its title, its last value, a legend for several runs, and the numbers as a table on request. `extra` are
 * curves by step that are known already; without `asks` they are all.
 */
export function Chart({ runs, metric, axis = "step", log = false, smooth = 0, events = [], range = null, onRange, tick = 0, asks = true, extra = [] }) {
  const { curves, error } = useCurves(asks ? runs : [], metric, axis, isReport() ? null : range, tick);
  const [table, show] = useState(false);
  const found = [...curves, ...(axis === "step" && (curves.length || !asks) ? extra : [])].filter((curve) => curve.series[metric]?.mean?.some((value) => value !== null));
  if (!found.length && !error) return null;
  const term = termOf(metric, runs);
  const unit = unitOf(metric === "held_out_loss" ? termOf("loss", runs) : term);
  const last = (curve) => curve.series[metric].mean.findLast((value) => value !== null);
  const words = found.map((curve) => t("chart.summary", { name: runName(curve.run), metric: nameOf(term), from: inUnit(term, curve.series[metric].mean.find((value) => value !== null)), to: inUnit(term, last(curve)), n: curve.total }));
  return html`<div class="chart" data-metric=${metric}>
    <div class="head">
      <h2 class="small"><${Term} id=${term} /> <span class="hint">${["1", "%"].includes(unit) ? "" : unit}</span></h2>
      <span class="grow"></span>
      ${found.length === 1 && html`<strong>${inUnit(term, last(found[0]))}</strong>`}
      <button type="button" class="quiet" aria-expanded=${table} onClick=${() => show(!table)}>${t("chart.numbers")}</button>
    </div>
    <${Problem} error=${error} />
    ${found.length > 0 && html`<${Plot} curves=${found} metric=${metric} term=${term} axis=${axis} log=${log} smooth=${smooth} events=${events} range=${range} onRange=${onRange ?? (() => {})} label=${`${words.join(" ")} ${t("chart.keys")}`} />`}
    ${found.length > 1 && html`<div class="legend">${found.map((curve, i) => html`<span key=${curve.run.id}><i class=${`s${i % COLOURS}`}></i>${runName(curve.run)} ${inUnit(term, last(curve))}</span>`)}</div>`}
    ${table && html`<${Numbers} curves=${found} metric=${metric} term=${term} axis=${axis} />`}
  </div>`;
}

/** At most forty rows of each curve, evenly spread. */
function Numbers({ curves, metric, term, axis }) {
  return curves.map((curve) => {
    const every = Math.max(1, Math.ceil(curve.x.length / 40));
    const rows = curve.x.map((x, i) => [x, i]).filter(([, i]) => i % every === 0);
    const values = curve.series[metric];
    return html`<div class="scroll" tabindex="0" role="group" aria-label=${`${runName(curve.run)} ${nameOf(term)}`}><table>
      <thead><tr><th scope="col">${t(`axis.${axis}`)}</th><th scope="col">${t("chart.mean")}</th><th scope="col">${t("chart.min")}</th><th scope="col">${t("chart.max")}</th></tr></thead>
      <tbody>${rows.map(([x, i]) => html`<tr key=${i}><td>${number(x)}</td><td>${inUnit(term, values.mean[i])}</td><td>${inUnit(term, values.min[i])}</td><td>${inUnit(term, values.max[i])}</td></tr>`)}</tbody>
    </table></div>`;
  });
}
