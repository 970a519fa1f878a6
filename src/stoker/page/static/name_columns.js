// Columns of a file that fits no format: each column that is needed gets the name that the file has for it.
import { html, useState } from "./html.js";
import { has, t } from "./i18n.js";
import { setKey } from "./job.js";
import { Action, Field } from "./ui.js";

const BESIDE = { chosen: "prompt" }; // a column that is needed beside another, unless it is part of it

/**
 * The columns of a problem: the job's key for their names, the names in the file, and for each column that is needed the
 * one that is most like it, or an empty name. Null for another problem.
 */
export function columnsOf({ columns = null, key }) {
  if (!columns) return null;
  const wanted = columns.needed.flatMap(([ours, theirs]) => [...(BESIDE[ours] ? [[BESIDE[ours], ""]] : []), [ours, theirs]]);
  return { key: key.replace(/\.path$/, ".columns"), names: columns.names, wanted };
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
