// The glossary: the meaning of every number, its unit, its formula, a healthy range, the key that changes it.
import { html, useRef, useState } from "./html.js";
import { has, number, percent, t } from "./i18n.js";

let entries = {};
const HEIGHT = 220; // px of an entry, for the choice whether it opens below or above its term

export async function loadGlossary() {
  setGlossary(await (await fetch(new URL("glossary.json", import.meta.url))).json());
}
export const setGlossary = (list) => (entries = Object.fromEntries(list.map((entry) => [entry.id, entry])));
export const glossary = () => Object.values(entries);
/** The id of the entry of a metric, whose number of places (`ndcg@10`) is no part of it. */
const entryId = (id) => id.replace(/@\d+$/, "");
export const unitOf = (id) => entries[entryId(id)]?.unit ?? "";
/** A metric's value as text: shares as percentages, others without their unit. */
export const inUnit = (id, value, digits) => (unitOf(id) === "%" ? percent(value) : number(value, digits));
export function nameOf(id) {
  const known = entryId(id);
  return has(`g.${known}.name`) ? t(`g.${known}.name`) + id.slice(known.length) : id;
}

const OF_TASK = {
  dpo: { loss: "preference_loss", accuracy: "pair_accuracy" },
  reward: { loss: "preference_loss", accuracy: "pair_accuracy" },
  ppo: { loss: "policy_loss" },
  grpo: { loss: "policy_loss" },
  ranking: { loss: "row_loss", tokens_per_s: "rows_per_s" },
  module: { loss: "module_loss" },
};

/** The id of the glossary's entry for a metric of some runs: that of their task if all have the same one, else the general one. */
export function termOf(metric, runs) {
  const terms = new Set(runs.map((run) => OF_TASK[run.task]?.[metric] ?? metric));
  return terms.size === 1 ? [...terms][0] : metric;
}

/** A term whose entry opens on hover, focus or press and closes with Escape. */
export function Term({ id, label }) {
  const [open, set] = useState(false);
  const [place, move] = useState({ left: "0", top: "0" });
  const button = useRef(null);
  const entry = entries[entryId(id)];
  const name = label ?? nameOf(id);
  if (!entry) return html`<span>${name}</span>`;
  const show = () => {
    const box = button.current.getBoundingClientRect();
    const side = box.bottom + HEIGHT < innerHeight ? { top: `${box.bottom + 4}px` } : { bottom: `${innerHeight - box.top + 4}px` };
    move({ left: `${Math.max(8, Math.min(box.left, innerWidth - 328))}px`, ...side });
    set(true);
  };
  return html`<span class="term" onMouseEnter=${show} onMouseLeave=${() => set(false)} onKeyDown=${(event) => event.key === "Escape" && set(false)}>
    <button type="button" ref=${button} aria-expanded=${open} onFocus=${show} onBlur=${() => set(false)} onClick=${show}>${name}</button>
    ${open && html`<span class="entry" role="tooltip" style=${place}><${Entry} entry=${entry} /></span>`}
  </span>`;
}

/** One entry in full. */
export const Entry = ({ entry }) =>
  html`<span class="entry-body">
    <strong>${nameOf(entry.id)}</strong> <span>${t(`g.${entry.id}.what`)}</span>
    <span><b>${t("glossary.unit")}</b> ${entry.unit}</span>
    <span><b>${t("glossary.formula")}</b> <code>${entry.formula}</code></span>
    <span><b>${t("glossary.healthy")}</b> ${t(`g.${entry.id}.healthy`)}</span>
    <span><b>${t("glossary.key")}</b> <code>${entry.key}</code></span>
  </span>`;

/** A number under its term. `value` is text already, with its unit. */
export const Figure = ({ id, value, note, level = "", label }) =>
  html`<div class=${`figure ${level}`}>
    <${Term} id=${id} label=${label} />
    <span class="number">${value}</span>
    ${note && html`<span class="hint">${note}</span>`}
  </div>`;
