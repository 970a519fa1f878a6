// The audit of a click log: labels, features as they were found, how ids spread, what may leak, what is missing.
import { Figure } from "./glossary.js";
import { html } from "./html.js";
import { number, percent, t } from "./i18n.js";
import { Said, Table } from "./ui.js";

export function LogAudit({ data }) {
  const ids = Object.entries(data.ids ?? {});
  const missing = Object.entries(data.missing ?? {}).filter(([, share]) => share > 0);
  return html`<div class="figures">
      <${Figure} id="rows_in" value=${number(data.rows_in)} />
      <${Figure} id="rows_used" value=${number(data.rows_used)} />
      <${Figure} id="rows_training" value=${number(data.training)} />
      <${Figure} id="rows_held_out" value=${number(data.held_out)} />
      ${Object.entries(data.labels ?? {}).map(([name, rate]) => html`<${Figure} key=${name} id="positive_rate" label=${t("log.positive", { name })} value=${percent(rate, 2)} />`)}
    </div>
    ${(data.leaks ?? []).map((leak) => html`<p class="problem" role="alert" key=${leak}><strong>${t("log.leak")}</strong> <${Said} text=${leak} /></p>`)}
    ${(data.warnings ?? []).map((warning) => html`<p class="problem" role="alert" key=${warning}><${Said} text=${warning} /></p>`)}
    <h2>${t("log.features")}</h2>
    <${Table} name=${t("log.features")} head=${[t("data.field"), t("log.kind"), t("data.reason"), t("run.details")]} rows=${data.columns.map((column) => [html`<code>${column.name}</code>`, column.kind, html`<${Said} text=${column.why} />`, html`<${Said} text=${column.details} />`])} />
    ${ids.length > 0 &&
    html`<h2>${t("log.ids")}</h2>
      <${Table} name=${t("log.ids")} head=${[t("data.field"), t("log.distinct"), t("log.lookups"), t("log.once"), t("log.unseen")]} rows=${ids.map(([name, one]) => [html`<code>${name}</code>`, number(one.ids), number(one.lookups), percent(one.once), percent(one.unseen)])} />`}
    ${missing.length > 0 && html`<h2>${t("log.missing")}</h2><${Table} name=${t("log.missing")} head=${[t("data.field"), t("log.share")]} rows=${missing.map(([name, share]) => [html`<code>${name}</code>`, percent(share)])} />`}`;
}
