// The form of a job, made from the schema: each key with its meaning, its default and the reason of it.
import { html, useState } from "./html.js";
import { has, said, t } from "./i18n.js";
import { Field, Loaded, Said, Spoken, Text } from "./ui.js";

export const BASIC = ["task", "model.name", "data.path", "tune.method", "steps", "train.lr", "train.batch", "train.seq_len", "evaluate.every"];
const OWN = ["reward", "dpo", "ppo", "grpo", "ranking", "module"]; // a task's own block

/** A value as its field shows it. */
export function shown(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
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
export function grouped(keys, task, wanted = "") {
  const groups = new Map();
  for (const key of keys) {
    const block = key.path.includes(".") ? key.path.split(".")[0] : "";
    if (OWN.includes(block) && block !== task) continue;
    if (BASIC.includes(key.path)) continue;
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
  const value = shown(now?.value ?? item.default);
  const wrong = problems.find((problem) => problem.key === item.path || problem.key?.startsWith(`${item.path}.`) || problem.key?.replace(/\[\d+\]/g, "") === item.path);
  const label = has(`key.${item.path}`) ? t(`key.${item.path}`) : item.path;
  const set = (event) => {
    event.stopPropagation();
    if (event.target.value !== value) onChange(item.path, meant(event.target.value));
  };
  const choices = item.choices ?? [];
  const isChoice = choices.length > 0 && (value === "" || choices.includes(value));
  const control = isChoice
    ? html`<select id=${id} value=${value} onChange=${set} aria-describedby=${`${id}-about`}>
        ${value === "" && html`<option value=""></option>`}
        ${choices.map((choice) => html`<option key=${choice} value=${choice}>${choice}</option>`)}
      </select>`
    : html`<${Text} id=${id} value=${value} onChange=${set} isKept=${true} isWrong=${Boolean(wrong)} aria-invalid=${Boolean(wrong)} aria-describedby=${`${id}-about`} spellcheck=${false} />`;
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

export function JobForm({ schema, check, yaml, onChange }) {
  const [wanted, want] = useState("");
  if (/^stages:/m.test(yaml)) return html`<p class="note">${t("job.is_chain")}</p>`;
  const field = (item) => html`<${Key} key=${item.path} item=${item} resolved=${check.resolved} problems=${check.problems} onChange=${onChange} />`;
  return html`<${Loaded} of=${schema}>
    ${({ keys }) => {
      const task = valueAt(check.resolved, "task")?.value ?? "";
      const byPath = new Map(keys.map((key) => [key.path, key]));
      const basic = BASIC.filter((path) => byPath.has(path)).map((path) => byPath.get(path));
      return html`<fieldset><legend>${t("job.basic")}</legend>${basic.map(field)}</fieldset>
        <${Field} id="find-key" label=${t("job.find_key")}><input id="find-key" type="search" value=${wanted} onInput=${(event) => want(event.target.value)} /><//>
        ${[...grouped(keys, task, wanted)].map(
          ([block, items]) => html`<details key=${block} open=${wanted !== ""}>
            <summary>${block ? html`<code>${block}</code>` : t("job.more")} (${items.length})</summary>
            <${Folded} items=${items} field=${field} isOpen=${wanted !== ""} />
          </details>`,
        )}`;
    }}
  <//>`;
}

/** Fields are made when their block is first opened: a form of two hundred keys stays quick. */
function Folded({ items, field, isOpen }) {
  const [seen, see] = useState(false);
  const watch = (node) => node?.parentElement?.addEventListener("toggle", () => see(true), { once: true });
  return html`<div ref=${watch}>${seen || isOpen ? items.map(field) : null}</div>`;
}
