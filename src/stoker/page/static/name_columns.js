// What the columns of a job's data are taken as: a drop-down for each role, whose choice becomes a key of the job.
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

/** A drop-down for each role of `roles`; those of `kept` always have a column. */
const Roles = ({ id, roles, names, kept = [], onChange }) =>
  Object.entries(roles).map(
    ([role, column]) => html`<${Field} key=${role} id=${`${id}-${role}`} label=${roleName(role)}>
      <select id=${`${id}-${role}`} value=${column} onChange=${(event) => onChange({ ...roles, [role]: event.target.value })}>
        ${!(kept.includes(role) && column) && html`<option value="">${t("columns.none")}</option>`}
        ${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
    <//>`,
  );

/** A role in the page's words. */
export const roleName = (role) => (has(`columns.${role}`) ? t(`columns.${role}`) : role);

/** A drop-down for each column that is needed; what is chosen becomes `columns` of the job's source. */
export function NameColumns({ of }) {
  const [chosen, choose] = useState(Object.fromEntries(of.wanted));
  const named = Object.fromEntries(Object.entries(chosen).filter(([, theirs]) => theirs));
  return html`<div class="panel">
    <p>${t("columns.which")}</p>
    <div class="row">
      <${Roles} id="column" roles=${chosen} names=${of.names} onChange=${choose} />
      <${Action} id="apply-columns" label=${t("columns.apply")} kind="primary" disabled=${Object.keys(named).length === 0} onPress=${() => setKey(of.key, named)} />
    </div>
  </div>`;
}

/** The edits of a job, as [key, value], after which the columns of a source are taken as was chosen. */
export function roleEdits({ key, roles, ignore }, chosen, leftOut = ignore) {
  if (key !== "ranking") {
    const named = Object.fromEntries(Object.entries(chosen).filter(([ours, theirs]) => theirs && theirs !== ours));
    return [[key, Object.keys(named).length ? named : null]];
  }
  const changed = Object.entries(chosen).filter(([role, column]) => column !== roles[role]);
  const found = changed.map(([role, column]) => [`ranking.${role}`, column || null]);
  const without = roles.time && !chosen.time ? [...leftOut, roles.time] : leftOut; // else its name could make it the time again
  return String(without) === String(ignore) ? found : [...found, ["ranking.ignore", without.length ? without : null]];
}

/** What the columns of a source are taken as; columns that are proposed are chosen already, and become the job's with the button. */
export function ColumnRoles({ source, id }) {
  const { path, names, format, roles, proposed, ignore } = source;
  const [chosen, choose] = useState({ ...roles, ...proposed });
  const [leftOut, leaveOut] = useState(ignore);
  const isLog = source.key === "ranking";
  const isChanged = JSON.stringify([chosen, leftOut]) !== JSON.stringify([roles, ignore]);
  const special = [chosen.label, chosen.time, chosen.weight];
  const toggle = (name) => leaveOut(leftOut.includes(name) ? leftOut.filter((other) => other !== name) : [...leftOut, name]);
  const apply = async () => {
    for (const [key, value] of roleEdits(source, chosen, leftOut)) await setKey(key, value);
  };
  return html`<section class="panel" aria-label=${t("columns.taken", { name: path.split("/").pop() })}>
    <p>${t("columns.taken", { name: path.split("/").pop() })} ${format && t("start.format", { format })}</p>
    <div class="row">
      <${Roles} id=${id} roles=${chosen} names=${names} kept=${isLog ? ["label", "group"] : Object.keys(roles).filter((role) => roles[role])} onChange=${choose} />
    </div>
    ${Object.entries(proposed).map(([role, name]) => chosen[role] === name && html`<p class="note" key=${role}>${t("columns.proposed", { name, role: roleName(role) })}</p>`)}
    ${isLog &&
    html`<details open=${leftOut.length > 0}><summary>${t("columns.left_out", { n: leftOut.length })}</summary>
      <div class="row">${names.map((name) => special.includes(name) || html`<label key=${name}><input type="checkbox" checked=${leftOut.includes(name)} onChange=${() => toggle(name)} /> ${name}</label>`)}</div>
    </details>`}
    <${Action} id=${`${id}-apply`} label=${t("columns.change")} kind=${isChanged ? "primary" : ""} disabled=${!isChanged} onPress=${apply} />
  </section>`;
}
