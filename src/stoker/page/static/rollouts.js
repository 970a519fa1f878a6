// The answers of a policy during training: each as a heat strip by token, the worst first, filtered by how it ended.
import { useGet } from "./api.js";
import { Term } from "./glossary.js";
import { html } from "./html.js";
import { number, said, t } from "./i18n.js";
import { go } from "./router.js";
import { HeatScale, Tokens, spanOf } from "./tokens.js";
import { Loaded, Said, Waiting } from "./ui.js";

const BY = ["advantage", "kl", "reward", "value", "return", "old", "entropy"]; // as `stoker rollouts --by`

export function Rollouts({ path, route }) {
  const { by = "advantage", ended = "", step, worst = "1" } = route.query;
  const found = useGet(`${path}/rollouts`, { step, worst: worst === "1" ? 1 : undefined });
  const set = (query) => go({ query }, { replace: true });
  return html`<${Loaded} of=${found}>
    ${({ step: shownStep, steps = [], rollouts = [] }) => {
      if (!rollouts.length && !found.isOld) return html`<p class="hint">${t("rollouts.none")}</p>`;
      const at = step ?? String(shownStep ?? "");
      const choices = steps.map(String).includes(at) || !at ? steps : [...steps, Number(at)];
      const endings = [...new Set(rollouts.map((one) => one.end).filter(Boolean))];
      const shown = rollouts.filter((one) => !ended || one.end === ended);
      const known = BY.filter((name) => rollouts.some((one) => one.tokens.some((token) => token[name] !== undefined && token[name] !== null)));
      const chosen = known.includes(by) ? by : known[0];
      const span = spanOf(shown, chosen);
      const controls = html`<div class="row">
          <label for="rollout-step">${t("g.step.name")}</label>
          <select id="rollout-step" value=${at} onChange=${(event) => set({ step: event.target.value })}>${choices.map((one) => html`<option key=${one} value=${String(one)}>${number(one)}</option>`)}</select>
          <label for="rollout-by">${t("rollouts.colour")}</label>
          <select id="rollout-by" value=${chosen} onChange=${(event) => set({ by: event.target.value })}>${known.map((name) => html`<option key=${name} value=${name}>${t(`g.${name}.name`)}</option>`)}</select>
          <label for="rollout-end">${t("rollouts.ended")}</label>
          <select id="rollout-end" value=${ended} onChange=${(event) => set({ ended: event.target.value })}><option value="">${t("rollouts.any")}</option>${endings.map((end) => html`<option key=${end} value=${end}>${said(end).text}</option>`)}</select>
          <label><input type="checkbox" checked=${worst === "1"} onChange=${(event) => set({ worst: event.target.checked ? "1" : "0" })} /> ${t("rollouts.worst")}</label>
        </div>`;
      if (found.isOld) return html`${controls}${!found.error && html`<${Waiting} what=${t("data.reading")} />`}`; // these are another step's
      return html`${controls}
        <${HeatScale} id=${chosen} span=${span} />
        ${shown.map(
          (one, i) => html`<div class="panel" key=${i}>
            <p><strong>${one.prompt}</strong> · <${Term} id="score" /> ${number(one.score)} · <${Said} text=${one.end} /></p>
            <${Tokens} tokens=${one.tokens} of=${chosen} scale=${Math.max(-span[0], span[1])} label=${t("rollouts.answer", { n: i + 1 })} />
          </div>`,
        )}`;
    }}
  <//>`;
}
