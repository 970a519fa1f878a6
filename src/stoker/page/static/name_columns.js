// Columns of a file that fits no format: each column that is needed gets the name that the file has for it.
import { html, useState } from "./html.js";
import { has, t } from "./i18n.js";
import { setKey } from "./job.js";
import { Action, Field } from "./ui.js";

const BESIDE = { chosen: "prompt" }; // a column that is needed beside another, unless it is part of it

/**
 * What a problem of a source says of its columns: the job's key for their names, the names in the file, and for each
 * column that is needed the one that is most like it, or an empty name. Null for another problem.
 */
export function columnsOf({ message, hint, suggestion = "", key = "" }) {
  const found = /the columns (.*?)(?:, \.\.\.)? fit no known format/.exec(message)?.[1];
  const wanted = /name your columns, `columns: \{(.*)\}`/.exec(hint ?? suggestion)?.[1];
  if (!found || !wanted) return null;
  const names = [...found.matchAll(/'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"/g)].map((one) => one[1] ?? one[2]);
  const pairs = wanted.split(/, (?=\w+: )/).map((one) => /^(\w+): (.*)$/s.exec(one).slice(1));
  const needed = pairs.flatMap(([ours]) => (BESIDE[ours] ? [BESIDE[ours], ours] : [ours]));
  const nearest = new Map(pairs);
  return { key: key ? key.replace(/\.path$/, ".columns") : "data.columns", names, wanted: needed.map((ours) => [ours, names.includes(nearest.get(ours)) ? nearest.get(ours) : ""]) };
}

/** A drop-down for each column that is needed; what is chosen becomes `columns` of the job's source. */
export function NameColumns({ of }) {
  const [chosen, choose] = useState(Object.fromEntries(of.wanted));
  const named = Object.fromEntries(Object.entries(chosen).filter(([, theirs]) => theirs));
  return html`<div class="panel">
    <p>${t("columns.which")}</p>
    <div class="row">
      ${of.wanted.map(
        ([ours]) => html`<${Field} key=${ours} id=${`column-${ours}`} label=${has(`columns.${ours}`) ? t(`columns.${ours}`) : ours}>
          <select id=${`column-${ours}`} value=${chosen[ours]} onChange=${(event) => choose({ ...chosen, [ours]: event.target.value })}>
            <option value=""></option>
            ${of.names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
          </select>
        <//>`,
      )}
      <${Action} id="apply-columns" label=${t("columns.apply")} kind="primary" disabled=${Object.keys(named).length === 0} onPress=${() => setKey(of.key, named)} />
    </div>
  </div>`;
}
