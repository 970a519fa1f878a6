// The result of `stoker eval` as a table: each figure under its name, with its unit.
import { html } from "./html.js";
import { bytes, has, number, percent, t } from "./i18n.js";
import { Table } from "./ui.js";

const LESS = "less "; // before the other run's name, in the subject of a difference
const VALUES = 20; // of a column, as on the command line
const SHOWN = { token_accuracy: percent, text_bytes: bytes, loss: (value) => `${number(value)} nat` };

/** The name of the rows that an evaluation is over; no path is one of the job's held-out rows. */
export const dataName = (path) => (!path || path === "held out" ? t("use.eval_held_out") : path.split("/").pop());

/** The name of a measure: that of its scorer, with its argument. */
export function metricName(metric) {
  const [kind, ...argument] = metric.split(":");
  const key = `metric.${kind.replaceAll(" ", "_")}`;
  return has(key) ? [t(key), ...argument].join(":") : metric;
}

/** The name of a figure: its measure, with its template or task; in a comparison also with its run, or as a difference. */
export function figureName({ kind, of, metric, subject, against }) {
  const name = [of, metricName(metric)].filter(Boolean).join(": ");
  if (against) return t("eval.difference", { metric: name, a: subject, b: against });
  return kind === "against" ? `${subject}: ${name}` : name;
}

/** A figure's name, value, interval and rows. */
export const evaluationCells = ({ value, low = null, high = null, rows, ...named }) => [
  figureName(named),
  number(value),
  low === null ? "–" : `${number(low)} … ${number(high)}`,
  rows === undefined ? "" : number(rows),
];

/** The sides of an evaluation of a loss: the tuned and the untuned model, or the only one. */
const sidesOf = (answer) => (answer.tuned && answer.untuned ? { tuned: answer.tuned, untuned: answer.untuned } : { value: answer });

/** Rows of a table of losses: the name of each number, and its value on each side. */
export function lossRows(answer) {
  const sides = Object.values(sidesOf(answer));
  const names = Object.keys(sides[0]).filter((name) => has(`eval.${name}`) && Number.isFinite(sides[0][name]));
  return names.map((name) => [t(`eval.${name}`), ...sides.map((side) => (SHOWN[name] ?? number)(side[name]))]);
}

/** Rows of a table of figures, with their intervals. */
export const figureRows = ({ kind, model, figures }) =>
  figures.map(({ of, name, ...figure }) => {
    const isComparison = kind === "against";
    const against = isComparison && of.startsWith(LESS) ? of.slice(LESS.length) : null;
    return evaluationCells({ kind, of: isComparison ? "" : of, metric: name, subject: against ? model : of, against, ...figure });
  });

const cellsOf = (of, figures) => Object.entries(figures).map(([metric, figure]) => evaluationCells({ of, metric, ...figure }).slice(0, 3));

/** Rows of a table of a ranking model's figures with their intervals: by label, then by the values of columns. */
export function rankingRows({ labels, slices, slices_by_label: byLabel }) {
  const names = Object.keys(labels);
  const several = names.length > 1;
  const sliced = Object.entries(byLabel ?? { [names[0]]: slices ?? {} }).flatMap(([label, columns]) =>
    Object.entries(columns).flatMap(([column, values]) =>
      Object.entries(values)
        .slice(0, VALUES)
        .flatMap(([value, figures]) => cellsOf(`${several ? `${label} ` : ""}${column} = ${value}`, figures)),
    ),
  );
  return [...names.flatMap((label) => cellsOf(several ? label : "", labels[label])), ...sliced];
}

/** Files of an evaluation that the run was trained on. */
export const trainedFiles = ({ trained_files: ofLoss, details }) => ofLoss ?? details?.trained_files ?? [];

export function Evaluated({ answer }) {
  const files = trainedFiles(answer);
  return html`${files.length > 0 && html`<p class="note">${t("eval.trained_on", { files: files.join(", ") })}</p>`}<${Figures} answer=${answer} />`;
}

function Figures({ answer }) {
  if (answer.labels) return html`<${Table} name=${t("run.tab.evaluations")} head=${[t("compare.metric"), t("compare.value"), t("g.interval.name")]} rows=${rankingRows(answer)} />`;
  const isLoss = !answer.figures;
  const rows = isLoss ? lossRows(answer) : figureRows(answer);
  if (!rows.length) return html`<pre class="log" tabindex="0">${JSON.stringify(answer, null, 2)}</pre>`;
  const head = isLoss ? Object.keys(sidesOf(answer)).map((side) => t(side === "value" ? "compare.value" : `eval.${side}`)) : [t("compare.value"), t("g.interval.name"), t("data.rows")];
  return html`<${Table} name=${t("run.tab.evaluations")} head=${[t("compare.metric"), ...head]} rows=${rows} />`;
}
