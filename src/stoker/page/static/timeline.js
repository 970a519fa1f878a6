// One step in time: a lane for each process of the pipeline, as the planner lays its passes out, and one for its messages.
import { Talk, place, short, totals } from "./communication.js";
import { html } from "./html.js";
import { percent, t } from "./i18n.js";

const KINDS = ["forward", "backward", "input", "weight"];
const SAID = "data parallel"; // follows the passes; the lanes of communication show it

// A step has a pipeline or copies of activations.
const OF_TIME = { compute: "s0", bubble: "s2", "pipeline sends": "s3", "activation copies": "s2", "data parallel": "s5", optimizer: "s4", critic: "s6", rollouts: "s7" };

/** The colour of a part of a step, the same in its bar and in its lanes. */
export const colourOfTime = (name) => OF_TIME[name];

export function Timeline({ timeline }) {
  const said = timeline.processes.flatMap(({ communication }) => communication ?? []);
  const after = Object.entries(timeline.after);
  const seconds = timeline.seconds + after.reduce((sum, [, took]) => sum + took, 0);
  const used = KINDS.filter((kind) => timeline.processes.some(({ spans }) => spans.some((span) => span.kind === kind)));
  const about = (span) => t("timeline.span", { kind: t(`timeline.${span.kind}`), stage: span.stage + 1, micro: span.micro_batch + 1, from: short(span.start), to: short(span.end) });
  let begin = timeline.seconds;
  const follows = after.map(([name, took]) => [name, begin, (begin += took)]);
  const tail = follows.filter(([name]) => name !== SAID || !said.length);
  return html`<div class="timeline" data-timeline>
    ${timeline.processes.map(
      ({ spans, idle, communication = [] }, i) => html`<div class="process" key=${i}>
        <div class="lane-row">
          <span>${t("timeline.process", { n: i + 1 })}</span>
          <div class="lane" role="img" aria-label=${t("timeline.words", { n: spans.length, share: percent(idle) })}>
            ${spans.map((span) => html`<span key=${`${span.kind}${span.stage}.${span.micro_batch}`} class=${`k-${span.kind}`} style=${place(span.start, span.end, seconds)} title=${about(span)}></span>`)}
            ${tail.map(([name, from, to]) => html`<span key=${name} class=${colourOfTime(name)} style=${place(from, to, seconds)} title=${`${t(`part.${name.replaceAll(" ", "_")}`)} ${short(to - from)}`}></span>`)}
          </div>
          <span class="hint">${t("timeline.waits", { share: percent(idle) })}</span>
        </div>
        ${communication.length > 0 && html`<${Talk} messages=${communication} seconds=${seconds} process=${t("timeline.process", { n: i + 1 })} />`}
      </div>`,
    )}
    <div class="legend">
      ${used.map((kind) => html`<span key=${kind}><i class=${`k-${kind}`}></i>${t(`timeline.${kind}`)}</span>`)}
      ${tail.map(([name, from, to]) => html`<span key=${name}><i class=${colourOfTime(name)}></i>${t(`part.${name.replaceAll(" ", "_")}`)} ${short(to - from)}</span>`)}
      ${totals(said).map(({ kind }) => html`<span key=${kind}><i class=${`k-${kind}`}></i>${t(`talk.${kind}`)}</span>`)}
    </div>
    <p class="hint">${t("timeline.drawn", { drawn: timeline.micro_batches, n: timeline.of })} ${said.length > 0 ? t("talk.drawn") : ""}</p>
  </div>`;
}
