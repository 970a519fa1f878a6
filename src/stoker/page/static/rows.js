// Rows of a job's data token by token: one by one, pairs beside each other, or packed as the run trains on them.
import { post, useGet } from "./api.js";
import { lossesLine } from "./commands.js";
import { html, useState } from "./html.js";
import { percent, t } from "./i18n.js";
import { go } from "./router.js";
import { HeatScale, Tokens, placeOf, spanOf } from "./tokens.js";
import { Action, Command, Loaded, Waiting } from "./ui.js";

const LOSS = "token_loss"; // in the glossary, and what colours tokens
const BY_TOKEN = ["pretrain", "sft"]; // tasks whose loss is one of single tokens
const SHOWN = { rows: 20, packed: 5 }; // sequences of a run at once

/** Pairs stand beside each other: a chosen row and the rejected one that follows it. */
export function paired(rows) {
  const groups = [];
  for (const row of rows) {
    const last = groups[groups.length - 1];
    const isPair = row.verdict === "rejected" && last?.length === 1 && last[0].verdict === "chosen";
    if (isPair) last.push(row);
    else groups.push([row]);
  }
  return groups;
}

/** A function of an object that is computed once for each: what is drawn again is then the same list. */
const once = (make) => {
  const kept = new WeakMap();
  return (of) => kept.get(of) ?? (kept.set(of, make(of)), kept.get(of));
};

/** The tokens of a row; its last one knows how the row ends, and each its loss under the name of the glossary. */
export const tokensOf = once(({ tokens, lost, continues }) => tokens.map((token, i) => ({ ...token, [LOSS]: token.loss, ...(i === tokens.length - 1 ? { lost, continues } : {}) })));

/** The tokens of a packed sequence end to end; the first one of each row knows which document begins there. */
export const joined = once(({ rows }) =>
  rows.flatMap((row, at) => tokensOf(row).map((token, i) => (i ? token : { ...token, document: { number: at + 1, row, tokens: row.tokens.length } }))),
);

/** How much of a packed sequence is filled, in words. */
export const filling = ({ number: at, capacity, tokens, rows }) =>
  capacity ? t("tokens.filled", { at, n: rows.length, tokens, capacity, share: percent(tokens / capacity) }) : t("tokens.sequence", { at, n: tokens });

/** Rows, pairs beside each other; `before(row)` and `behind(row, group)` give what belongs to a row. */
export const RowList = ({ rows, of, scale, before, behind }) =>
  paired(rows).map(
    (group, at) => html`<div class=${`sample ${group.length > 1 ? "pair" : ""}`} key=${`${group[0].source}:${group[0].row}:${at}`}>
      ${group.map((row) => html`<div key=${row.verdict}><${Head} row=${row} before=${before} /><${Tokens} tokens=${tokensOf(row)} of=${of} scale=${scale} label=${placeOf(row)} />${behind?.(row, group)}</div>`)}
    </div>`,
  );

const Head = ({ row, before }) => {
  const mean = meanLoss(row);
  return html`<p class="hint">${before?.(row)} ${placeOf(row)} ${row.verdict && t(`verdict.${row.verdict}`)} ${mean !== null && t("tokens.row_loss", { loss: mean })} ${row.expected && t("tokens.expected", { answer: row.expected })}</p>`;
};

/** Packed sequences; `before` and `behind` as those of a list of rows. */
export const Packed = ({ sequences, of, scale, before, behind }) =>
  sequences.map(
    (one) => html`<div class="sample" key=${one.number}>
      <p class="hint">${filling(one)}</p>
      <${Tokens} tokens=${joined(one)} of=${of} scale=${scale} label=${filling(one)} />
      ${before && one.rows.map((row, i) => html`<div key=${i}><${Head} row=${row} before=${before} />${behind(row, [row])}</div>`)}
    </div>`,
  );

/** Rows in the order of their files, or sequences as the run packs them. */
export const Order = ({ packed, id }) =>
  html`<label for=${id}>${t("tokens.order")}</label>
    <select id=${id} value=${packed ? "1" : ""} onChange=${(event) => go({ query: { packed: event.target.value, from: "" } }, { replace: true })}>
      <option value="">${t("tokens.of_files")}</option>
      <option value="1">${t("tokens.as_trained")}</option>
    </select>`;

/** Whether the rows of a task are sequences of tokens. */
export const hasTokens = (task) => !["ranking", "module"].includes(task);

/** What was measured, where it answers the question that is shown; null where that has changed meanwhile. */
export const answerTo = (question, measured) => (measured && JSON.stringify(measured.question) === JSON.stringify(question) ? measured.answer : null);

/** What was measured of the rows that are shown, in words. */
export const measuredWords = ({ step, loss, tokens }) => (Number.isFinite(loss) ? t("tokens.measured", { step, loss, n: tokens }) : t("tokens.none_trained", { step }));

/** Which sequences are shown; none where `begin` lies behind the last one. */
export function shownWords(begin, shown, total) {
  const n = total ?? begin + shown;
  if (!shown) return t("tokens.beyond", { n });
  return shown === 1 ? t("tokens.one_of", { at: begin + 1, n }) : t("tokens.from_to", { first: begin + 1, last: begin + shown, n });
}

/** The rows of a run's data, a part at a time, and on demand the loss of each trained token at a checkpoint. */
export function RunRows({ path, run, route }) {
  const { packed = "", from = "0", at = "last" } = route.query;
  const [begin, limit] = [Number(from) || 0, packed ? SHOWN.packed : SHOWN.rows];
  const found = useGet(`${path}/rows`, { offset: begin, limit, packed: packed ? 1 : undefined });
  const [last, set] = useState(null);
  const question = { path, begin, packed, at };
  const measured = answerTo(question, last);
  const measure = async () => set({ question, answer: await post(`${path}/token-losses`, { offset: begin, limit, packed: Boolean(packed), at }) });
  const move = (to) => go({ query: { from: to > 0 ? String(to) : "" } }, { replace: true });
  return html`<${Loaded} of=${found}>
    ${({ total, checkpoints, command }) => {
      const { rows = [], sequences = [] } = measured ?? found.data;
      const of = measured ? LOSS : "";
      const every = [...rows, ...sequences.flatMap((one) => one.rows)];
      const span = measured ? spanOf(every, "loss") : [0, 0];
      const shown = rows.length + sequences.length;
      const controls = html`<div class="row">
        <${Order} packed=${packed} id="rows-order" />
        ${BY_TOKEN.includes(run.task) &&
        html`<label for="rows-at">${t("tokens.checkpoint")}</label>
          <select id="rows-at" value=${at} onChange=${(event) => go({ query: { at: event.target.value } }, { replace: true })}>
            ${["last", "best"].map((name) => html`<option key=${name} value=${name}>${t(`tokens.at.${name}`)}</option>`)}
            ${checkpoints?.map((step) => html`<option key=${step} value=${String(step)}>${t("run.at_step", { step })}</option>`)}
          </select>
          <${Action} id="rows-loss" label=${t("tokens.measure")} line=${lossesLine(run, { limit, begin, packed, at })} onPress=${measure} disabled=${checkpoints?.length === 0} reason=${t("tokens.no_checkpoint")} />`}
      </div>`;
      if (found.isOld) return html`${controls}${!found.error && html`<${Waiting} what=${t("data.reading")} />`}`;
      return html`${controls}
        <${Command} line=${measured?.command ?? command} />
        ${measured && html`<p role="status">${measuredWords(measured)}</p>`}${measured?.tokens > 0 && html`<${HeatScale} id=${LOSS} span=${span} />`}
        <p class="hint">${!measured && t("tokens.legend")} ${shownWords(begin, shown, total)}</p>
        <${RowList} rows=${rows} of=${of} scale=${measured ? span[1] : undefined} />
        <${Packed} sequences=${sequences} of=${of} scale=${measured ? span[1] : undefined} />
        <div class="row">
          <button type="button" disabled=${begin === 0} onClick=${() => move(Math.max(0, (shown ? begin : (total ?? begin)) - limit))}>${t("tokens.before")}</button>
          <button type="button" disabled=${total !== null && begin + shown >= total} onClick=${() => move(begin + shown)}>${t("tokens.after")}</button>
        </div>`;
    }}
  <//>`;
}

/** The mean loss of a row's trained tokens; null where none has one. */
export function meanLoss(row) {
  const losses = row.tokens.map((token) => token.loss).filter((value) => Number.isFinite(value));
  return losses.length ? losses.reduce((sum, value) => sum + value, 0) / losses.length : null;
}
