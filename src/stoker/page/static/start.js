// Start: a file, a recipe or another tool's file becomes a job; the job is written here, as a form and as YAML.
import { get, post, useGet } from "./api.js";
import { nameFrom } from "./folder_name.js";
import { html, useRef, useState } from "./html.js";
import { has, percent, t } from "./i18n.js";
import { Job } from "./job.js";
import { taskOf } from "./job_form.js";
import { roleName } from "./name_columns.js";
import { go, link } from "./router.js";
import { runName, wholeJobs } from "./run_list.js";
import { remember, replaceJob, session, useSession } from "./session.js";
import { Action, Loaded, Problem, Progress, Said, Spoken, Status, Table } from "./ui.js";
import { DATA_FILES, Drop, described, namedTogether, sourceOf, withFormer } from "./upload.js";
import { Users } from "./users.js";

const FIRST = ["sft-lora", "dpo", "grpo-arithmetic", "pretrain-10m", "ranking-movielens"];

const LOST = ["dropped", "unknown", "missing"]; // of another tool's file: what the job does not carry

/** What an importer says of a key, whether as text or as an object. */
export const inWords = (one) => (typeof one === "string" ? one : Object.values(one).filter((value) => value !== null && value !== "").join(": "));

const COMPARED = ["preference", "hh_rlhf", "ranked", "scored"]; // formats with several answers to a prompt

/** The keys of a recipe that name its data, where a file of this format can take its place: of each stage, or the job's. */
export const dataKeys = (stages, format) =>
  stages.length ? stages.flatMap(({ task }, i) => (["dpo", "reward"].includes(task) === COMPARED.includes(format) ? [`stages[${i}].data`] : [])) : ["data"];

/** The edits that make a file the data of a recipe. Of a ranking recipe, the threshold of the ratings is that of its own data, and the time column found by its values is named. */
export const editsFor = (file, stages, task) => [
  ...dataKeys(stages, file.format).map((key) => ({ key, value: sourceOf(file) })),
  ...(task === "ranking" ? [{ key: "ranking.positive", value: null }, ...(file.likely_time ? [{ key: "ranking.time", value: file.likely_time }] : [])] : []),
];

/** A recipe becomes the job at hand, on the file that was uploaded where there is one. */
async function begin(recipe, file) {
  let { yaml, stages } = await get(`/api/recipes/${encodeURIComponent(recipe.name)}`);
  if (file) yaml = (await post("/api/edit", { yaml, edits: editsFor(file, stages, taskOf(yaml)) })).yaml;
  replaceJob({ yaml, name: nameFrom(file ? file.name : recipe.name) });
  go({ place: "start", run: "job" });
}

function Recipes({ file }) {
  const found = useGet("/api/recipes");
  const [error, setError] = useState(null);
  const order = (recipe) => (FIRST.includes(recipe.name) ? FIRST.indexOf(recipe.name) : FIRST.length);
  return html`<section aria-labelledby="recipes">
    <h2 id="recipes">${file ? t("start.what_to_teach", { name: namedTogether(file) }) : t("start.recipes")}</h2>
    <${Problem} error=${error} />
    <${Loaded} of=${found}>
      ${({ recipes }) => html`<div class="grid">
        ${[...recipes].sort((a, b) => order(a) - order(b)).map(
          (recipe) => html`<button type="button" key=${recipe.name} class="card" data-recipe=${recipe.name} onClick=${() => begin(recipe, file).catch(setError)}>
            <strong>${has(`recipe.${recipe.name}`) ? t(`recipe.${recipe.name}`) : recipe.name}</strong>
            <span class="kind">${has(`recipe.${recipe.name}.about`) ? t(`recipe.${recipe.name}.about`) : html`<${Said} text=${recipe.description} />`}</span>
          </button>`,
        )}
      </div>`}
    <//>
  </section>`;
}

/** A file that was uploaded: its columns and its format, as its first rows have them. */
function Uploaded({ file }) {
  const { columns = [], format, taken = {}, likely_time: time, rows, unreadable, problem } = file;
  const roles = Object.entries(taken).map(([role, column]) => t("start.taken", { column, role: roleName(role) }));
  const without = html`<button type="button" class="quiet" onClick=${() => remember({ file: "" })}>${t("start.without_file")}</button>`;
  if (problem) return html`<div class="problem" role="alert"><p>${file.name}</p><${Spoken} error=${problem} /></div>${without}`;
  return html`<div class="note" role="status">
    ${t(file.files ? "start.have_files" : "start.have_file", { name: namedTogether(file) })} ${without}
    ${columns.length > 0 && html`<p class="hint">${t("start.columns", { columns: columns.join(", ") })} ${t(format ? "start.format" : "start.no_format", { format })} ${roles.length > 0 && roles.join(" · ")} ${!format && time && t("start.time", { column: time })}</p>`}
    ${unreadable > 0 && html`<p class="lost">${t("start.unreadable", { n: unreadable, rows })}</p>`}
  </div>`;
}

function Recent() {
  const found = useGet("/api/runs", {}, { every: 5000 });
  const rows = wholeJobs(found.data?.runs ?? []).slice(0, 5).map((run) => [
    html`<a href=${link({ place: "train", run: run.id })}>${runName(run)}</a>`,
    html`<${Status} status=${run.status} />`,
    run.steps ? html`<${Progress} value=${run.step / run.steps} label=${run.name} /> ${percent(run.step / run.steps, 0)}` : "",
  ]);
  if (!rows.length) return null;
  return html`<section aria-labelledby="recent">
    <h2 id="recent">${t("start.recent")}</h2>
    <${Table} name=${t("start.recent")} head=${[t("run.name"), t("run.status"), t("run.progress")]} rows=${rows} />
  </section>`;
}

/** The files of an import: those of a refused one, too, where only LLaMA-Factory's register is dropped after them. */
export const together = (refused, files) => (files.every(({ name }) => name === "dataset_info.json") ? [...refused, ...files] : files);

/** The job of another tool's files, which belong together: one request for all. */
export async function imported(files) {
  const contents = await Promise.all(files.map(async (file) => ({ name: file.name, text: await file.text() })));
  return { ...(await post("/api/import", { files: contents })), name: files[0].name };
}

function Import() {
  const [found, set] = useState(null);
  const refused = useRef([]);
  const take = async (files) => {
    if (!files.length) return;
    refused.current = together(refused.current, files);
    set(null);
    const answer = await imported(refused.current);
    refused.current = [];
    if (answer.own) use(answer);
    else set(answer);
  };
  const use = ({ yaml, name }) => {
    replaceJob({ yaml, name: nameFrom(name) });
    go({ place: "start", run: "job" });
  };
  return html`<section aria-labelledby="import">
    <h2 id="import">${t("start.import")}</h2>
    <${Drop} id="import-file" label=${t("start.import_drop")} hint=${t("start.import_hint")} accept=".yaml,.yml,.json,.py,.sh,.toml" onFiles=${take} />
    ${found &&
    html`<div class="panel">
      <pre class="log" tabindex="0" aria-label=${t("job.yaml")}>${found.yaml}</pre>
      ${LOST.flatMap((kind) => (found[kind] ?? []).map((one, i) => html`<p class="note" key=${kind + i}><strong>${t(`import.${kind}`)}</strong> <${Said} text=${inWords(one)} /></p>`))}
      <${Action} label=${t("start.use_import")} kind="primary" line=${found.command ?? `stoker import ${found.name}`} onPress=${() => use(found)} />
    </div>`}
  </section>`;
}

function Begin({ me }) {
  const state = useSession();
  const isOnlySeen = me?.role === "see";
  const done = async (id) => {
    const former = session().file;
    const file = await described(await get(`/api/uploads/${id}`));
    remember({ file: withFormer(former, file) });
    const unused = former && [former, file].find((each) => each.problem);
    if (unused) throw { ...unused.problem, file: unused.name };
  };
  return html`<h1>${t("start.title")}</h1>
    <div class="split">
      <section>
        ${isOnlySeen ? html`<p class="note">${t("job.only_see")}</p>` : html`<${Drop} id="file" label=${t("start.drop")} hint=${t("start.drop_hint")} accept=${DATA_FILES} onBegin=${() => remember({ file: "" })} onDone=${done} />`}
        ${state.file && html`<${Uploaded} file=${state.file} />`}
      </section>
      <section class="grid" aria-label=${t("start.ways")}>
        <a class="card" href=${link({ place: "train" })}><strong>${t("start.see_runs")}</strong><span class="kind">${t("start.see_runs_why")}</span></a>
        <a class="card" href=${link({ place: "use" })}><strong>${t("start.judge")}</strong><span class="kind">${t("start.judge_why")}</span></a>
        ${state.yaml && html`<a class="card" href=${link({ place: "start", run: "job" })}><strong>${t("start.go_on")}</strong><span class="kind">${state.name}</span></a>`}
      </section>
    </div>
    <${Recipes} file=${state.file && !state.file.problem ? state.file : ""} />
    <${Recent} />
    ${!isOnlySeen && html`<${Import} />`}`;
}

export default ({ route, me }) => (route.run === "job" ? html`<${Job} me=${me} line=${Number(route.query.line)} />` : route.run === "users" ? html`<${Users} />` : html`<${Begin} me=${me} />`);
