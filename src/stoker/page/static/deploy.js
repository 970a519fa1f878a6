// Deploy: servers of models that outlive the page, what they serve, their callers' keys, and how much is asked.
import { post, remove, useGet } from "./api.js";
import { askLine, addKeyLine, deployLine, killLine, loadLine, removeKeyLine, unloadLine } from "./commands.js";
import { Term } from "./glossary.js";
import { html, useState } from "./html.js";
import { failureOf, number, t, time } from "./i18n.js";
import { Action, Command, Field, Loaded, Problem, Status, Table, Text, Waiting } from "./ui.js";

const EVERY = 2000; // ms between two looks
const IS_ON = ["starting", "running"];

/** A name under which a run can be served. */
export const servedName = (name) => name.replace(/[^\w.:@+-]+/g, "-").replace(/^[^\w]+/, "").slice(0, 100) || "model";

/** Seconds of a quantile, in milliseconds where they are few. */
export const latency = (value) => (value === null || value === undefined ? "–" : value < 1 ? `${number(value * 1000, 3)} ms` : `${number(value, 3)} s`);

const pathOf = (server, ...parts) => ["/api/servers", server.id, ...parts].map((part, i) => (i ? encodeURIComponent(part) : part)).join("/");

/** The command line of a server on another port; an empty one is that of the line. */
export const onPort = (line, port) => (port === "" ? line : line.replace(/--port \d+/, `--port ${port}`));

/** A form that serves a run: on a server of its own, or beside the adapters of one that runs. */
function Deploy({ run, servers, onDone }) {
  const [named, setName] = useState(null);
  const [where, setWhere] = useState("");
  const [port, setPort] = useState("0");
  const name = named ?? servedName(run.name);
  const server = servers.find((one) => one.id === where && one.status === "running");
  const press = async () => {
    if (server) await post(pathOf(server, "models"), { run: run.id, name });
    else await post("/api/servers", { run: run.id, name, port: Number(port) });
    onDone();
  };
  return html`<p>${t("deploy.about")}</p>
    <div class="row">
      <${Field} id="served-name" label=${t("deploy.name")}><input id="served-name" value=${name} onInput=${(event) => setName(event.target.value)} /><//>
      <${Field} id="served-where" label=${t("deploy.where")}><select id="served-where" value=${server?.id ?? ""} onChange=${(event) => setWhere(event.target.value)}>
        <option value="">${t("deploy.new")}</option>
        ${servers.filter((one) => one.status === "running").map((one) => html`<option key=${one.id} value=${one.id}>${t("deploy.beside", { address: one.address, names: Object.keys(one.models).join(", ") })}</option>`)}
      </select><//>
      ${!server && html`<${Field} id="served-port" label=${t("deploy.port")}><${Text} id="served-port" type="number" min="0" max="65535" value=${port} onChange=${(event) => setPort(event.target.value)} /><//>`}
    </div>
    <${Action} id="deploy" label=${t("deploy.press")} kind="primary" line=${server ? loadLine(server, name, run.folder) : deployLine(run, name, port)} onPress=${press} />`;
}

function Models({ server, onDone }) {
  const found = useGet(pathOf(server, "models"), {}, { every: EVERY });
  const retire = (one) => async () => {
    await remove(pathOf(server, "models", one.name));
    found.again();
    onDone();
  };
  const rows = (models) => models.map((one) => [
    html`<strong>${one.name}</strong>`,
    one.parent ? t("deploy.adapter_of", { base: one.parent }) : t("deploy.base"),
    one.path,
    one.parent && html`<${Action} label=${t("deploy.retire", { name: one.name })} kind="quiet" line=${unloadLine(server, one.name)} onPress=${retire(one)} />`,
  ]);
  return html`<${Loaded} of=${found}>${({ models }) => html`<${Table} keys=${models.map((one) => one.name)} name=${t("deploy.models")} head=${[t("use.model"), t("deploy.kind"), t("use.folder"), ""]} rows=${rows(models)} />`}<//>`;
}

function Keys({ server }) {
  const found = useGet(pathOf(server, "keys"), {}, { every: 5 * EVERY });
  const [name, setName] = useState("");
  const [made, setMade] = useState(null);
  const add = async () => {
    setMade(await post(pathOf(server, "keys"), { name }));
    setName("");
    found.again();
  };
  const revoke = (key) => async () => {
    await remove(pathOf(server, "keys", key.name));
    if (made?.name === key.name) setMade(null);
    found.again();
  };
  const id = `key-name-${server.id}`;
  const listed = useGet(made && server.address ? pathOf(server, "models") : "").data?.models ?? [];
  const model = listed.find((one) => one.name === Object.keys(server.models)[0]);
  return html`<div class="row">
      <${Field} id=${id} label=${t("deploy.key_name")}><input id=${id} autocomplete="off" value=${name} onInput=${(event) => setName(event.target.value)} /><//>
      <${Action} label=${t("deploy.add_key")} disabled=${!name} line=${addKeyLine(server, name)} onPress=${add} />
    </div>
    ${made && html`<div class="note" role="status"><p>${t("deploy.key_once", { name: made.name })} <code data-key=${made.name}>${made.key}</code></p>${model && html`<p>${t("deploy.ask")}</p><${Command} line=${askLine(server, model, made.key)} />`}</div>`}
    <${Loaded} of=${found}>${({ keys }) => html`<${Table} keys=${keys.map((key) => key.name)} name=${t("deploy.keys")} head=${[t("deploy.key_name"), t("users.role"), ""]} empty=${t("deploy.no_keys")} rows=${keys.map((key) => [key.name, t(`role.${key.role}`), html`<${Action} label=${t("deploy.revoke", { name: key.name })} kind="quiet" line=${removeKeyLine(server, key.name)} onPress=${revoke(key)} />`])} />`}<//>`;
}

function Traffic({ server }) {
  const found = useGet(pathOf(server, "traffic"), {}, { every: EVERY });
  const both = (one) => html`${latency(one.p50)} / ${latency(one.p95)}`;
  return html`<${Loaded} of=${found}>
    ${(data) => html`<p class="hint">${t("deploy.now", { n: data.requests, refused: data.refused, running: data.running, waiting: data.waiting })}</p>
      <${Table}
        name=${t("deploy.traffic")}
        head=${[t("use.model"), t("deploy.key_name"), html`<${Term} id="answers" />`, html`<${Term} id="prompt_tokens" />`, html`<${Term} id="answer_tokens" />`, html`<${Term} id="first_token" />`, html`<${Term} id="answer_seconds" />`]}
        empty=${t("deploy.no_traffic")}
        rows=${data.rows.map((row) => [row.model, row.key || t("deploy.own_token"), html`<span data-answers=${row.key}>${number(row.answers)}</span>`, number(row.prompt_tokens), number(row.answer_tokens), both(row.first_token), both(row.answer_seconds)])}
      />`}
  <//>`;
}

function Log({ server }) {
  const found = useGet(pathOf(server), {}, { every: EVERY });
  return html`<${Loaded} of=${found}>${({ log }) => html`<pre class="log" tabindex="0" aria-label=${t("run.tab.logs")}>${log || t("deploy.no_log")}</pre>`}<//>`;
}

function Server({ server, onDone }) {
  const [open, setOpen] = useState(false);
  const [port, setPort] = useState(String(server.port || ""));
  const act = (what, body) => async () => {
    await post(pathOf(server, what), body);
    onDone();
  };
  const portId = `port-${server.id}`;
  const names = Object.keys(server.models).join(", ");
  const title = `server-${server.id}`;
  return html`<section class="panel" aria-labelledby=${title} data-server=${server.id}>
    <h2 id=${title}>${names || t("deploy.no_models")} <${Status} status=${server.status} /></h2>
    <p class="hint">${server.address && html`<code>${server.address}/v1</code> · `}${t("deploy.since", { time: time(server.begun), user: server.user })}</p>
    <${Command} line=${server.command} />
    ${server.error && html`<${Problem} error=${failureOf(`error: ${server.error}`)} />`}
    ${server.status === "starting" && html`<${Waiting} what=${t("deploy.loading")} />`}
    ${server.status === "running" && html`<h3>${t("deploy.models")}</h3><${Models} server=${server} onDone=${onDone} /><h3>${t("deploy.traffic")}</h3><${Traffic} server=${server} />`}
    <h3>${t("deploy.keys")}</h3>
    <${Keys} server=${server} />
    <div class="actions">
      ${IS_ON.includes(server.status)
        ? html`<${Action} label=${t("deploy.stop")} kind="danger" line=${killLine(server)} onPress=${act("stop")} confirm=${t("deploy.stop_sure")} />`
        : html`<${Field} id=${portId} label=${t("deploy.port")}><${Text} id=${portId} type="number" min="0" max="65535" value=${port} onChange=${(event) => setPort(event.target.value)} /><//>
            <${Action} label=${t("deploy.start")} kind="primary" line=${onPort(server.command, port)} disabled=${!names} reason=${t("deploy.no_models")} onPress=${act("start", port === "" ? {} : { port: Number(port) })} />
            <${Action} label=${t("deploy.remove")} onPress=${() => remove(pathOf(server)).then(onDone)} />`}
      <button type="button" class="quiet" aria-expanded=${open} onClick=${() => setOpen(!open)}>${t("run.tab.logs")}</button>
    </div>
    ${open && html`<${Log} server=${server} />`}
  </section>`;
}

/** The tab: `run` is what would be deployed; without one, only the servers. */
export function Servers({ run }) {
  const found = useGet("/api/servers", {}, { every: EVERY });
  return html`<${Loaded} of=${found}>
    ${({ servers }) => html`${run && html`<${Deploy} key=${run.id} run=${run} servers=${servers} onDone=${found.again} />`}
      ${!servers.length && html`<p class="hint">${t("deploy.none")}</p>`}
      ${servers.map((server) => html`<${Server} key=${server.id} server=${server} onDone=${found.again} />`)}`}
  <//>`;
}
