// The messages of a process of the pipeline in a step, as a lane below that of its passes.
import { html } from "./html.js";
import { number, t } from "./i18n.js";

export const short = (seconds) => (seconds >= 1 || !seconds ? `${number(seconds, 3)}\u00a0s` : seconds < 1e-3 ? `${number(seconds * 1e6, 3)}\u00a0µs` : `${number(seconds * 1000, 3)}\u00a0ms`);

/** Where a time lies in a step, and how long it takes, in percent of its width. */
export const place = (start, end, seconds) => ({ left: `${(100 * start) / seconds}%`, width: `${(100 * (end - start)) / seconds}%` });

/**
 * Messages as bars: a message that takes a share of the time between its start and its end has that share of the lane's
 * height. Messages with the same start and end are stacked.
 */
export function bars(messages) {
  const sums = new Map();
  const window = ({ start, end }) => `${start}~${end}`;
  for (const message of messages) sums.set(window(message), (sums.get(window(message)) ?? 0) + message.seconds);
  const below = new Map();
  return messages.map((message) => {
    const length = Math.max(message.end - message.start, sums.get(window(message))); // as high as the lane at most
    const bottom = below.get(window(message)) ?? 0;
    const height = length > 0 ? message.seconds / length : 0;
    below.set(window(message), bottom + height);
    return { message, bottom: 100 * bottom, height: 100 * height };
  });
}

/** The seconds of each kind: in total, and while no pass runs. */
export function totals(messages) {
  const found = new Map();
  for (const { kind, seconds, exposed } of messages) {
    const sum = found.get(kind) ?? { seconds: 0, exposed: 0 };
    found.set(kind, { seconds: sum.seconds + seconds, exposed: sum.exposed + exposed });
  }
  return [...found].map(([kind, sum]) => ({ kind, ...sum }));
}

const about = ({ kind, stage, micro_batch, start, end, seconds, exposed }) => {
  const args = { kind: t(`talk.${kind}`), seconds: short(seconds), exposed: short(exposed), from: short(start), to: short(end) };
  return stage === null ? t("talk.after", args) : t("talk.message", { ...args, stage: stage + 1, micro: micro_batch + 1 });
};

export function Talk({ messages, seconds, process }) {
  const all = totals(messages);
  const exposed = short(all.reduce((sum, one) => sum + one.exposed, 0));
  const list = all.map((one) => `${t(`talk.${one.kind}`)} ${short(one.seconds)}`).join(", ");
  return html`<div class="lane-row talk">
    <span class="hint">${t("talk.lane")}</span>
    <div class="lane" role="img" aria-label=${t("talk.words", { process, list, exposed })}>
      ${bars(messages).map(
        ({ message, bottom, height }, i) => html`<span key=${i} class=${`k-${message.kind} ${message.exposed ? "" : "hidden-by"}`} style=${{ ...place(message.start, message.end, seconds), bottom: `${bottom}%`, height: `${height}%` }} title=${about(message)}></span>`,
      )}
    </div>
    <span class="hint">${t("talk.exposed", { exposed })}</span>
  </div>`;
}
