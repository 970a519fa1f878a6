// The users of the page and their roles, for an admin.
import { patch, post, remove, useGet } from "./api.js";
import { addUserLine, changeUserLine, removeKeyLine } from "./commands.js";
import { html, useState } from "./html.js";
import { t, time } from "./i18n.js";
import { Action, Command, Field, Loaded, Said, Table } from "./ui.js";

const ROLES = ["see", "run", "admin"];

const Roles = ({ id, value, onChange, name }) =>
  html`<select id=${id} aria-label=${name} value=${value} onChange=${(event) => onChange(event.target.value)}>${ROLES.map((role) => html`<option key=${role} value=${role}>${t(`role.${role}`)}</option>`)}</select>`;

/** A user's role, changed by a button once another was picked. */
function Role({ file, user, onDone }) {
  const [role, setRole] = useState(user.role);
  const change = () => patch(`/api/users/${encodeURIComponent(user.name)}`, { role }).then(onDone);
  return html`<div class="row"><${Roles} name=${t("users.role_of", { name: user.name })} value=${role} onChange=${setRole} />
    ${role !== user.role && html`<${Action} label=${t("users.change")} kind="primary" line=${changeUserLine(file, user.name, role)} onPress=${change} />`}</div>`;
}

function Add({ file, onDone }) {
  const [name, setName] = useState("");
  const [role, setRole] = useState("see");
  const [made, setMade] = useState(null);
  const add = async () => {
    setMade(await post("/api/users", { name, role }));
    setName("");
    onDone();
  };
  return html`<div class="row">
      <${Field} id="user-name" label=${t("users.name")}><input id="user-name" autocomplete="off" value=${name} onInput=${(event) => setName(event.target.value)} /><//>
      <${Field} id="user-role" label=${t("users.role")}><${Roles} id="user-role" value=${role} onChange=${setRole} /><//>
      <${Action} id="add-user" label=${t("users.add")} kind="primary" disabled=${!name} line=${addUserLine(file, name, role)} onPress=${add} />
    </div>
    ${made && html`<div class="note" role="status"><p>${t("users.token_once", { name: made.name })} <code data-token=${made.name}>${made.token}</code></p><${Command} line=${made.command} /></div>`}`;
}

function Log() {
  const found = useGet("/api/audit-log", {}, { every: 5000 });
  return html`<h2>${t("users.log")}</h2>
    <${Loaded} of=${found}>${({ lines }) => html`<${Table} name=${t("users.log")} head=${[t("run.when"), t("users.name"), t("users.action"), t("ui.command")]} empty=${t("use.no_actions")} rows=${lines.slice(0, 100).map((line) => [time(line.time), line.user, html`<${Said} text=${line.action} />`, line.command && html`<code>${line.command}</code>`])} />`}<//>`;
}

export function Users() {
  const found = useGet("/api/users");
  const out = (user) => () => remove(`/api/users/${encodeURIComponent(user.name)}`).then(found.again);
  const rows = ({ users, editable, file }) => users.map((user) => [
    user.name,
    editable ? html`<${Role} key=${`${user.name}${user.role}`} file=${file} user=${user} onDone=${found.again} />` : t(`role.${user.role}`),
    editable && html`<${Action} label=${t("users.remove", { name: user.name })} confirm=${t("users.remove_sure")} line=${removeKeyLine({ keys_file: file }, user.name)} onPress=${out(user)} />`,
  ]);
  return html`<h1>${t("users.title")}</h1>
    <p>${t("users.about")}</p>
    <${Loaded} of=${found}>
      ${(all) => html`${all.editable ? html`<${Add} file=${all.file} onDone=${found.again} />` : html`<p class="note">${t("users.no_file")}</p><${Command} line="stoker ui --users FILE" />`}
        <${Table} keys=${all.users.map((user) => user.name)} name=${t("users.title")} head=${[t("users.name"), t("users.role"), ""]} rows=${rows(all)} />`}
    <//>
    <${Log} />`;
}
