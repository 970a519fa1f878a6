// A ranking model's lookup: a row typed or picked from its log, scored, with what was found in the tables.
import { post, runPath, useGet } from "./api.js";
import { Term } from "./glossary.js";
import { html, useState } from "./html.js";
import { number, percent, t } from "./i18n.js";
import { Action, Field, Loaded, Table } from "./ui.js";
import { scoreLine } from "./commands.js";

const PAGE = 20; // rows of the log shown at once

/** What a field's text means in a row: a list or an object of JSON, else the text, as CSV has numbers and ids. */
export function cell(text) {
  if (text.trim() === "") return undefined;
  if (!/^\s*[[{]/.test(text)) return text; // a number of 64 bits stays whole
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** A row of the fields' texts, without what is empty. */
export const rowOf = (texts) => Object.fromEntries(Object.entries(texts).map(([name, text]) => [name, cell(text)]).filter(([, value]) => value !== undefined));

const textOf = (value) => (value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(typeof value === "boolean" ? Number(value) : value));

function Found({ lookups }) {
  return html`<${Table}
    name=${t("lookup.ids")}
    head=${[t("lookup.column"), html`<${Term} id="ids_found" />`, html`<${Term} id="ids_missing" />`]}
    empty=${t("lookup.no_ids")}
    rows=${Object.entries(lookups).map(([name, { found, missing }]) => [html`<code>${name}</code>`, number(found), missing ? html`<strong data-missing=${name}>${number(missing)} · ${t("lookup.default_row")}</strong>` : number(0)])}
  />`;
}

function Scores({ answer }) {
  const [first] = answer.data;
  const chance = answer.probabilities;
  return html`<div class="panel" role="status">
    <h2>${t("lookup.score")}</h2>
    <${Table} name=${t("lookup.score")} head=${[t("lookup.label"), chance ? html`<${Term} id="probability" />` : t("lookup.score")]} rows=${Object.entries(first.scores).map(([label, score]) => [label, html`<strong data-score=${label}>${chance ? percent(score, 2) : number(score)}</strong>`])} />
    <${Found} lookups=${first.lookups} />
    <p class="hint">${t("lookup.step", { step: answer.step })} ${answer.ignored && t("lookup.ignored", { names: answer.ignored })}</p>
  </div>`;
}

function Form({ run, log }) {
  const [texts, set] = useState(Object.fromEntries(log.columns.map((column) => [column.name, ""])));
  const [answer, setAnswer] = useState(null);
  const row = rowOf(texts);
  const write = (name) => (event) => set({ ...texts, [name]: event.target.value });
  const score = async () => setAnswer(await post("/api/score", { run: run.id, rows: [row] }));
  const pick = (value) => set(Object.fromEntries(log.columns.map((column) => [column.name, textOf(value[column.name])])));
  const columns = log.columns.map((column) => column.name);
  return html`<p>${t("lookup.about")}</p>
    <div class="grid">${log.columns.map((column) => html`<${Field} key=${column.name} id=${`column-${column.name}`} label=${column.name} hint=${t(`column.${column.kind}`)}><input id=${`column-${column.name}`} aria-describedby=${`column-${column.name}-hint`} value=${texts[column.name]} onInput=${write(column.name)} /><//>`)}</div>
    <${Action} id="score" label=${t("lookup.press")} kind="primary" line=${scoreLine(run, row)} onPress=${score} />
    ${answer && html`<${Scores} answer=${answer} />`}
    <h2>${t("lookup.rows")}</h2>
    <${Table}
      name=${t("lookup.rows")}
      head=${[t("data.row"), ...columns, ...log.labels, ""]}
      rows=${log.rows.map(({ row: at, value }) => [number(at), ...[...columns, ...log.labels].map((name) => textOf(value[name])), html`<button type="button" class="quiet" aria-label=${t("lookup.pick", { row: at })} onClick=${() => pick(value)}>${t("lookup.take")}</button>`])}
    />`;
}

export function Lookup({ run }) {
  const [offset, move] = useState(0);
  const found = useGet(`${runPath(run.id)}/log-rows`, { offset, limit: PAGE });
  return html`<${Loaded} of=${found}>
    ${(log) => html`<${Form} run=${run} log=${log} />
      <div class="row"><button type="button" disabled=${!offset} onClick=${() => move(Math.max(0, offset - PAGE))}>${t("lookup.back")}</button><button type="button" disabled=${log.rows.length < PAGE} onClick=${() => move(offset + PAGE)}>${t("lookup.more")}</button></div>`}
  <//>`;
}
