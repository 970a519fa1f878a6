// The form of a job, made from the schema: each key with its meaning, its default and the reason of it.
import { html, useState } from "./html.js";
import { has, said, t } from "./i18n.js";
import { useSession } from "./session.js";
import { Action, Field, Loaded, Said, Spoken, Table, Text, Waiting } from "./ui.js";
import { namedTogether, sourceOf } from "./upload.js";

const LANGUAGE = ["task", "model.name", "data.path", "tune.method", "steps", "train.lr", "train.batch", "train.seq_len", "evaluate.every"];
const OF_TASK = {
  ranking: ["task", "data.path", "ranking.label", "ranking.time", "ranking.positive", "ranking.model", "epochs", "train.batch", "ranking.table.lr", "train.lr", "evaluate.every"],
  module: ["task", "module.model", "module.loss", "module.data", "steps", "train.lr", "train.batch", "evaluate.every"],
};
const SWITCH = { true: "job.on", false: "job.off" };
const OWN = ["reward", "dpo", "ppo", "grpo", "ranking", "module"]; // a task's own block

/** A value as its field shows it. */
export function shown(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** The task that a job's text names. */
export const taskOf = (yaml) => /^task:\s*["']?(\w+)/m.exec(yaml)?.[1] ?? "";

/** Whether a job's text has stages. */
export const hasStages = (yaml) => /^stages:/m.test(yaml);

/** The names of the stages of a job's text, of those that begin with their name. */
export function stageNames(yaml) {
  const chain = /^stages:\n((?:[ -].*\n?|\n)*)/m.exec(yaml)?.[1] ?? "";
  return [...chain.matchAll(/^ *- *(?:\{ *)?name: *["']?([\w-]+)/gm)].map((found) => found[1]);
}

/** The keys of a job that its form shows first: those of its task, and its length as the job has it, in steps or epochs. */
export function basicOf(task, resolved) {
  const has = (path) => (valueAt(resolved, path)?.value ?? null) !== null;
  const length = has("epochs") && !has("steps") ? "epochs" : has("steps") ? "steps" : null;
  const paths = OF_TASK[task] ?? LANGUAGE;
  return paths.map((path) => (length && ["steps", "epochs"].includes(path) ? length : path));
}

/** What a field's text means: a number, a switch, nothing, a large integer as text, a list or mapping in JSON, or the text. */
export function meant(text) {
  const plain = text.trim();
  if (plain === "") return null;
  if (plain === "true" || plain === "false") return plain === "true";
  if (/^-?\d+$/.test(plain) && !Number.isSafeInteger(Number(plain))) return plain; // the server reads it as a number
  if (/^-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(plain)) return Number(plain);
  if (/^[[{]/.test(plain)) {
    try {
      return JSON.parse(plain);
    } catch {
      return plain;
    }
  }
  return plain;
}

/** The keys of a task, by block, in the schema's order; blocks of other tasks are left out. */
export function grouped(keys, task, basic, wanted = "") {
  const groups = new Map();
  for (const key of keys) {
    const block = key.path.includes(".") ? key.path.split(".")[0] : "";
    if (OWN.includes(block) && block !== task) continue;
    if (basic.includes(key.path)) continue;
    const isMatch = !wanted || `${key.path} ${key.meaning}`.toLowerCase().includes(wanted.toLowerCase());
    if (!isMatch) continue;
    groups.set(block, [...(groups.get(block) ?? []), key]);
  }
  return groups;
}

/** The value of a key as resolved; of `data`, that of the first source. */
export function valueAt(resolved, path) {
  return resolved[path] ?? resolved[path.replace(/^data\./, "data[0].")];
}

function Key({ item, resolved, problems, onChange }) {
  const id = `key-${item.path.replaceAll(".", "-")}`;
  const now = valueAt(resolved, item.path);
  const isKnown = Object.keys(resolved).length > 0; // of a job that has never been valid, no value is
  const value = shown(now?.value ?? (isKnown ? item.default : null));
  const wrong = problems.find((problem) => problem.key === item.path || problem.key?.startsWith(`${item.path}.`) || problem.key?.replace(/\[\d+\]/g, "") === item.path);
  const label = has(`key.${item.path}`) ? t(`key.${item.path}`) : item.path;
  const set = (event) => {
    event.stopPropagation();
    onChange(item.path, meant(event.target.value));
  };
  const choices = item.choices ?? [];
  const selected = wrong || !choices.includes(value) ? "" : value; // what is wrong is no choice: each one is a change
  const control = item.only_choices
    ? html`<select id=${id} value=${selected} onChange=${set} aria-invalid=${Boolean(wrong)} aria-describedby=${`${id}-about`}>
        ${selected === "" && html`<option value=""></option>`}
        ${choices.map((choice) => html`<option key=${choice} value=${choice}>${SWITCH[choice] ? t(SWITCH[choice]) : choice}</option>`)}
      </select>`
    : html`<${Text} id=${id} value=${value} list=${choices.length ? `${id}-choices` : undefined} onChange=${set} isKept=${true} isWrong=${Boolean(wrong)} aria-invalid=${Boolean(wrong)} aria-describedby=${`${id}-about`} spellcheck=${false} />
        ${choices.length > 0 && html`<datalist id=${`${id}-choices`}>${choices.map((choice) => html`<option key=${choice} value=${choice}></option>`)}</datalist>`}`;
  return html`<div class=${wrong ? "field wrong" : "field"}>
    <label for=${id}>${label} ${label !== item.path && html`<code>${item.path}</code>`}</label>
    ${control}
    ${wrong && html`<div class="message" role="alert"><${Spoken} error=${wrong} /></div>`}
    <p class="hint" id=${`${id}-about`}>
      ${has(`about.${item.path}`) ? t(`about.${item.path}`) : html`<${Said} text=${item.meaning} />`}
      ${now?.why && html`${" "}${t("job.because", { reason: said(now.why).text })}`}
    </p>
  </div>`;
}

/** The stages of a job with the data of each, which an uploaded file can take the place of. */
function Stages({ stages, onChange }) {
  const { file } = useSession();
  const rows = stages.map(({ name, resolved }, i) => {
    const path = shown(valueAt(resolved, "data.path")?.value);
    return [
      html`<code>${name}</code>`,
      shown(resolved.task?.value),
      html`<code title=${path}>${path.split("/").pop()}</code>`,
      file && path !== file.path && html`<${Action} label=${t("job.stage_file", { name: namedTogether(file) })} onPress=${() => onChange(`stages[${i}].data`, sourceOf(file))} />`,
    ];
  });
  return html`<p class="note">${t("job.is_chain")}</p>
    ${rows.length > 0 && html`<${Table} name=${t("job.stages")} head=${[t("job.stage"), t("key.task"), t("key.data.path"), ""]} rows=${rows} />`}`;
}

export function JobForm({ schema, check, yaml, onChange }) {
  const [wanted, want] = useState("");
  if (hasStages(yaml)) return html`<${Stages} stages=${check.stages ?? []} onChange=${onChange} />`;
  const field = (item) => html`<${Key} key=${item.path} item=${item} resolved=${check.resolved} problems=${check.problems} onChange=${onChange} />`;
  return html`<${Loaded} of=${schema}>
    ${({ keys }) => {
      const task = taskOf(yaml);
      const byPath = new Map(keys.map((key) => [key.path, key]));
      const basic = basicOf(task, check.resolved);
      return html`<fieldset class="whole" disabled=${check.checked === null}>
        ${check.checked === null && html`<${Waiting} what=${t("job.checking")} />`}
        <fieldset><legend>${t("job.basic")}</legend>${basic.filter((path) => byPath.has(path)).map((path) => field(byPath.get(path)))}</fieldset>
        <${Field} id="find-key" label=${t("job.find_key")}><input id="find-key" type="search" value=${wanted} onInput=${(event) => want(event.target.value)} /><//>
        ${[...grouped(keys, task, basic, wanted)].map(
          ([block, items]) => html`<details key=${block} open=${wanted !== ""}>
            <summary>${block ? html`<code>${block}</code>` : t("job.more")} (${items.length})</summary>
            <${Folded} items=${items} field=${field} isOpen=${wanted !== ""} />
          </details>`,
        )}
      </fieldset>`;
    }}
  <//>`;
}

/** Fields are made when their block is first opened: a form of two hundred keys stays quick. */
function Folded({ items, field, isOpen }) {
  const [seen, see] = useState(false);
  const watch = (node) => node?.parentElement?.addEventListener("toggle", () => see(true), { once: true });
  return html`<div ref=${watch}>${seen || isOpen ? items.map(field) : null}</div>`;
}
