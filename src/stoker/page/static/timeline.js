// One step in time: a lane for each process of the pipeline, as the planner lays its passes out.
import { html } from "./html.js";
import { number, percent, t } from "./i18n.js";

/** Where a time lies in a step, and how long it takes, in percent of its width. */
export const place = (start, end, seconds) => ({ left: `${(100 * start) / seconds}%`, width: `${(100 * (end - start)) / seconds}%` });

const short = (seconds) => (seconds < 1 ? `${number(seconds * 1000, 3)} ms` : `${number(seconds, 3)} s`);

const KINDS = ["forward", "backward", "input", "weight"];

export function Timeline({ timeline }) {
  const after = Object.entries(timeline.after);
  const seconds = timeline.seconds + after.reduce((sum, [, took]) => sum + took, 0);
  const used = KINDS.filter((kind) => timeline.processes.some(({ spans }) => spans.some((span) => span.kind === kind)));
  const about = (span) => t("timeline.span", { kind: t(`timeline.${span.kind}`), stage: span.stage + 1, micro: span.micro_batch + 1, from: short(span.start), to: short(span.end) });
  let begin = timeline.seconds;
  const tail = after.map(([name, took]) => [name, begin, (begin += took)]);
  return html`<div class="timeline" data-timeline>
    ${timeline.processes.map(
      ({ spans, idle }, i) => html`<div class="lane-row" key=${i}>
        <span>${t("timeline.process", { n: i + 1 })}</span>
        <div class="lane" role="img" aria-label=${t("timeline.words", { n: spans.length, share: percent(idle) })}>
          ${spans.map((span) => html`<span key=${`${span.kind}${span.stage}.${span.micro_batch}`} class=${`k-${span.kind}`} style=${place(span.start, span.end, seconds)} title=${about(span)}></span>`)}
          ${tail.map(([name, from, to], j) => html`<span key=${name} class=${`s${4 + (j % 2)}`} style=${place(from, to, seconds)} title=${`${t(`part.${name.replaceAll(" ", "_")}`)} ${short(to - from)}`}></span>`)}
        </div>
        <span class="hint">${t("timeline.waits", { share: percent(idle) })}</span>
      </div>`,
    )}
    <div class="legend">${used.map((kind) => html`<span key=${kind}><i class=${`k-${kind}`}></i>${t(`timeline.${kind}`)}</span>`)}${tail.map(([name, from, to], j) => html`<span key=${name}><i class=${`s${4 + (j % 2)}`}></i>${t(`part.${name.replaceAll(" ", "_")}`)} ${short(to - from)}</span>`)}</div>
    <p class="hint">${t("timeline.drawn", { drawn: timeline.micro_batches, n: timeline.of })}</p>
  </div>`;
}
