// A verb that was started through the page and outlives it.
import { useGet } from "./api.js";
import { Evaluated } from "./evaluated.js";
import { html, useEffect, useState } from "./html.js";
import { number, t } from "./i18n.js";
import { Failure, Problem, Said, Status } from "./ui.js";

const EVERY = 1000; // ms between two looks
export const isOn = (status) => ["starting", "running"].includes(status);

/** What a verb says, until it has ended. */
export function Doing({ id }) {
  const [isOver, end] = useState(false);
  const found = useGet(id ? `/api/actions/${encodeURIComponent(id)}` : "", {}, { every: isOver ? 0 : EVERY });
  const status = found.data?.status;
  useEffect(() => end(status !== undefined && !isOn(status)), [status]);
  if (!id) return null;
  const one = found.data;
  return html`<${Problem} error=${found.error} />
    ${one &&
    html`<div class="panel" role="status">
      <div class="row"><${Status} status=${one.status} /><code>${one.command}</code></div>
      <${Result} one=${one} />
    </div>`}`;
}

function Result({ one }) {
  if (one.status === "failed" && !one.json) return html`<${Failure} text=${one.output} />`;
  if (one.json && one.verb === "eval") return html`<${Evaluated} answer=${one.json} />`;
  if (one.json?.written) return html`<${Exported} answer=${one.json} />`;
  return (one.json || one.output) && html`<pre class="log" tabindex="0" aria-label=${one.command}>${one.json ? JSON.stringify(one.json, null, 2) : one.output}</pre>`;
}

/** The result of `stoker export`: what was written, and how it was verified. */
const Exported = ({ answer }) =>
  html`<dl>
    <dt>${t("export.written")}</dt><dd><code>${answer.written}</code></dd>
    <dt>${t("g.step.name")}</dt><dd>${number(answer.step)}</dd>
    <dt>${t("export.verified")}</dt><dd><${Said} text=${answer.verified} /></dd>
    ${(answer.warnings ?? []).map((text) => html`<dt key=${text}>${t("export.warning")}</dt><dd><${Said} text=${text} /></dd>`)}
  </dl>`;

/** The id of the newest of some actions, which begin with the newest, that is a verb about a run; empty for none. */
export const newestAction = (actions, verb, run) => actions.find((one) => one.verb === verb && one.run === run)?.id ?? "";

/** The action that a place shows: the one that it has started, or else the newest; and a function that sets it. */
export function useAction(verb, run) {
  const [id, started] = useState("");
  const earlier = useGet("/api/actions").data?.actions ?? [];
  return [id || newestAction(earlier, verb, run), started];
}
