// The stages of a job as a graph: each is to the right of all stages that it needs, with the state of its run.
import { html } from "./html.js";
import { t } from "./i18n.js";
import { link } from "./router.js";
import { Status } from "./ui.js";

/** Stages by column: one more than the last column of those that it needs. A need that is not a stage counts for nothing. */
export function columns(stages) {
  const at = {};
  for (const { name, needs } of stages) at[name] = 1 + Math.max(-1, ...needs.map((need) => at[need] ?? -1)); // in the job's order
  const found = [];
  for (const stage of stages) (found[at[stage.name]] ??= []).push(stage);
  return found;
}

/** The graph; `current` is the id of the run that is looked at. */
export function Chain({ stages, current }) {
  return html`<ol class="chain" aria-label=${t("plan.chain")}>
    ${columns(stages).map(
      (column, i) => html`<li key=${i}><ul>
        ${column.map(
          (stage) => html`<li key=${stage.name} class=${`stage ${stage.id === current ? "current" : ""}`} data-stage=${stage.name}>
            ${stage.status === "waiting" ? html`<strong>${stage.name}</strong>` : html`<a href=${link({ place: "train", run: stage.id, tab: "" })} aria-current=${stage.id === current ? "true" : undefined}>${stage.name}</a>`}
            <${Status} status=${stage.status} />
            <span class="hint">${t(`task.${stage.task}`)}</span>
            ${stage.needs.length > 0 && html`<span class="hint">${t("chain.needs", { names: stage.needs.join(", ") })}</span>`}
          </li>`,
        )}
      </ul></li>`,
    )}
  </ol>`;
}
