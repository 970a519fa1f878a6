// The command lines of actions on a run, as they are before the server has run them; its answer's own line is shown after.

/** A word as a shell needs it. */
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", "'\\''")}'`);

const line = (...words) => ["stoker", ...words.filter((word) => word !== "" && word !== undefined && word !== null).map(quoted)].join(" ");

export const startLine = (name) => line("train", `${name}.yaml`, `output=runs/${name}`);
export const submitLine = (name, on, dry = false) => line("submit", `${name}.yaml`, "--on", on || "TARGET", dry ? "--dry-run" : "");
export const stopLine = (run) => line("stop", run.folder);
export const resumeLine = (run, changes = []) => line("train", `${run.folder}/job.yaml`, ...changes);
export const forkLine = (run, output) => line("train", `${run.folder}/job.yaml`, `output=${output}`);
/** A run copied beside itself, and moved aside. */
export const copyLine = ({ folder }) => `cp -r ${quoted(folder)} ${quoted(`${folder}-fork`)}`;
export const moveLine = ({ folder }) => `mv ${quoted(folder)} ${quoted(`${folder}.1`)}`;
export const chatLine = (run, adapter, { temperature, max, system }) =>
  line("chat", run.folder, adapter ? "" : "--compare", ...(Number(temperature) ? ["--temperature", temperature] : []), "--max-tokens", max, ...(system ? ["--system", system] : []));
export const exportLine = (run, format, to) => line("export", run.folder, "--format", format, "--to", to);
export const evalLine = (run, options = []) => line("eval", run.folder, ...options);
export const deployLine = (run, name, port) => line("serve", `${name}=${run.folder}`, "--port", String(port), "--token-file", "token", "--keys", "keys");
const asked = (server, path, body) => `curl -H "Authorization: Bearer $(cat ${quoted(server.token_file)})" ${server.address}${path} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}`;
/** What `stoker serve` of a ranking run is asked. */
export const scoreLine = (run, row) => `curl http://127.0.0.1:8000/v1/score -H 'Content-Type: application/json' -d ${quoted(JSON.stringify({ model: run.name, rows: [row], lookups: true }))}`;
export const loadLine = (server, name, folder) => asked(server, "/v1/load_lora_adapter", { lora_name: name, lora_path: folder });
export const unloadLine = (server, name) => asked(server, "/v1/unload_lora_adapter", { lora_name: name });
export const killLine = (server) => `kill ${server.pid ?? ""}`;
export const addKeyLine = (server, name) => line("keys", server.keys_file, "--add", name);
export const removeKeyLine = (server, name) => line("keys", server.keys_file, "--remove", name);
/** The path and the body of a first request to a model, as the server lists it: a ranking, reward or language model. */
export function firstQuestion({ name: model, columns, scores }) {
  const messages = [{ role: "user", content: "…" }];
  if (columns) return ["/v1/score", { model, rows: [Object.fromEntries(columns.map((column) => [column, null]))] }];
  if (scores) return ["/v1/score", { model, messages: [...messages, { role: "assistant", content: "…" }] }];
  return ["/v1/chat/completions", { model, messages }];
}
/** The first question that a caller asks with a key. */
export function askLine(server, model, key) {
  const [path, body] = firstQuestion(model);
  return `curl -H "Authorization: Bearer ${key}" ${server.address}${path} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}`;
}
export const reportLine = (run) => line("report", run.folder, "-o", `${run.name}.html`);
export const rolloutsLine = (run, step) => line("rollouts", run.folder, "--step", String(step));
export const lossesLine = (run, { limit, begin, packed, at }) => line("eval", run.folder, "--by-token", String(limit), ...(begin ? ["--offset", String(begin)] : []), packed ? "--packed" : "", ...(at === "last" ? [] : ["--at", at]));
export const addUserLine = (file, name, role) => line("keys", file, "--add", name, "--role", role);
export const changeUserLine = (file, name, role) => line("keys", file, "--change", name, "--role", role);
/** A file of data moved aside, into a folder that is named by the time. */
export const asideLine = (file) => {
  const folder = file.path.slice(0, file.path.lastIndexOf("/"));
  return `mv ${quoted(folder)} ${quoted(`${folder.slice(0, -file.id.length)}removed-${file.id}-`)}$(date +%s%N)`;
};
