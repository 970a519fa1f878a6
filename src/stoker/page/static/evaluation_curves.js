// Curves of what the evaluations of a run have measured, step by step, from its events.
import { t } from "./i18n.js";

const NOT_DRAWN = ["time", "step", "seconds", "targets", "log_loss", "perplexity", "positive_rate", "table_rows", "ids_admitted", "ids_evicted"]; // of an evaluation

/** The figures of a run's evaluations by name, each as a curve; of a step that was done again the newest counts. */
export function evaluatedCurves(events, run) {
  const found = new Map(); // by name and step
  for (const event of events.filter((one) => one.event === "evaluated" && Number.isFinite(one.step))) {
    for (const [name, value] of Object.entries(event)) {
      if (NOT_DRAWN.includes(name) || !Number.isFinite(value)) continue;
      const metric = name === "loss" ? "held_out_loss" : name;
      if (!found.has(metric)) found.set(metric, new Map());
      found.get(metric).set(event.step, value);
    }
  }
  const curve = ([metric, values]) => {
    const x = [...values.keys()].sort((a, b) => a - b);
    const mean = x.map((step) => values.get(step));
    return [metric, { run, x, series: { [metric]: { mean, min: mean, max: mean } }, total: x.length }];
  };
  return Object.fromEntries([...found].map(curve));
}

/** The curves of a run's evaluations by chart: in that of the metric itself where the run has it at each step, else alone. */
export function besideOwn(evaluated, metrics) {
  const chart = ([metric, curve]) => {
    const own = metric === "held_out_loss" ? "loss" : metric;
    if (!metrics.includes(own)) return [metric, [curve]];
    const name = t(own === "loss" ? "g.held_out_loss.name" : "run.held_out");
    return [own, [{ ...curve, run: { id: `${curve.run.id}/held`, name }, series: { [own]: curve.series[metric] } }]];
  };
  return Object.fromEntries(Object.entries(evaluated).map(chart));
}

/** The curves of the evaluations of runs by chart, given the events of each; those that the runs have at each step are not drawn. */
export function heldOutOf(runs, events, metrics) {
  const charts = {};
  for (const [i, run] of runs.entries()) {
    for (const [metric, curve] of Object.entries(evaluatedCurves(events[i], run))) if (!metrics.includes(metric)) (charts[metric] ??= []).push(curve);
  }
  return charts;
}
