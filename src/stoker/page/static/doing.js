// A verb that was started through the page and outlives it.
import { useGet } from "./api.js";
import { html } from "./html.js";
import { Problem, Status } from "./ui.js";

const EVERY = 1000; // ms between two looks

/** What a verb says, until it has ended. */
export function Doing({ id }) {
  const found = useGet(id ? `/api/actions/${encodeURIComponent(id)}` : "", {}, { every: EVERY });
  if (!id) return null;
  const one = found.data;
  return html`<${Problem} error=${found.error} />
    ${one &&
    html`<div class="panel" role="status">
      <div class="row"><${Status} status=${one.status} /><code>${one.command}</code></div>
      ${(one.json || one.output) && html`<pre class="log" tabindex="0" aria-label=${one.command}>${one.json ? JSON.stringify(one.json, null, 2) : one.output}</pre>`}
    </div>`}`;
}
