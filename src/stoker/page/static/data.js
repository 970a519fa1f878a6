// Data: files, the audit of the job at hand, and its rows token by token.
import { get, post, remove, useGet } from "./api.js";
import { asideLine } from "./commands.js";
import { Figure } from "./glossary.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { bytes, dated, number, percent, t, time } from "./i18n.js";
import { hasStages, stageNames, taskOf } from "./job_form.js";
import { LogAudit } from "./log_audit.js";
import { ColumnRoles, NameColumns, columnsOf } from "./name_columns.js";
import { go, link } from "./router.js";
import { Order, Packed, RowList, hasTokens } from "./rows.js";
import { SETTLED, remember, rememberJob, session, useSession } from "./session.js";
import { Action, Command, Loaded, NothingYet, Problem, Said, Table, Tabs, Waiting, useSettled } from "./ui.js";
import { DATA_FILES, Drop, described, inPlaceOf } from "./upload.js";

const PAGE = { rows: 50, packed: 10 }; // sequences asked for at once

/** The server's answer about a job, requested once for each text: {data, error, busy}. */
export function useAnswer(path, body) {
  const [state, set] = useState({ data: null, error: null, busy: true });
  useEffect(() => {
    const stop = new AbortController();
    set({ data: null, error: null, busy: true });
    post(path, body, stop.signal).then(
      (data) => set({ data, error: null, busy: false }),
      (error) => stop.signal.aborted || set({ data: null, error, busy: false }),
    );
    return () => stop.abort();
  }, [path, JSON.stringify(body)]);
  return state;
}

const FIRST = 5; // rows of a file that are shown in the list

/** The first rows of an uploaded file, as they are written. */
function First({ file }) {
  const [isOpen, set] = useState(false);
  const found = useGet(isOpen ? `/api/data/${file.id}/rows` : "", { limit: FIRST });
  return html`<button type="button" class="quiet" aria-expanded=${isOpen} onClick=${() => set(!isOpen)}>${t("data.first")}</button>
    ${isOpen && html`<${Loaded} of=${found} what=${t("data.reading")}>${({ rows }) => html`<pre class="log" tabindex="0" aria-label=${file.name}>${rows.map((row) => row.problem || row.text).join("\n")}</pre>`}<//>`}`;
}

/** Names of files; of several with one name each has its time. */
export const namesOf = (files) => files.map((file) => (files.some((other) => other.name === file.name && other.id !== file.id) ? `${file.name} · ${dated(file.time)}` : file.name));

function Files({ isOnlySeen }) {
  const found = useGet("/api/data");
  const state = useSession();
  const use = async (file) => {
    if (hasStages(state.yaml)) { // the form has the data of each stage
      remember({ file: await described(file) });
      return go({ place: "start", run: "job", tab: "" });
    }
    const { yaml } = await post("/api/edit", { yaml: state.yaml, edits: [{ key: "data", value: file.path }] });
    return rememberJob({ yaml, file: await described(file) });
  };
  const teach = async (file) => {
    remember({ file: await described(file) });
    go({ place: "start", run: "", tab: "" });
  };
  return html`${isOnlySeen ? html`<p class="note">${t("job.only_see")}</p>` : html`<${Drop} id="data-file" label=${t("start.drop")} hint=${t("start.drop_hint")} accept=${DATA_FILES} onDone=${found.again} />`}
    <h2>${t("data.files")}</h2>
    <${Loaded} of=${found}>
      ${({ data: files }) =>
        html`<${Table}
          name=${t("data.files")}
          head=${[t("data.name"), t("data.size"), t("data.created"), t("data.parent"), ""]}
          empty=${t("data.no_files")}
          keys=${files.map((file) => file.id)}
          rows=${files.map((file) => [
            html`${file.name} ${file.done && html`<${First} file=${file} />`}`,
            file.done ? bytes(file.size) : t("data.incomplete", { came: bytes(file.offset), size: bytes(file.size) }),
            dated(file.time),
            file.parent ? (files.find((other) => other.id === file.parent)?.name ?? String(file.parent)) : "",
            !isOnlySeen && html`<div class="row">${file.done && html`<${Action} label=${t("data.teach")} onPress=${() => teach(file)} />`}${state.yaml && file.done && html`<${Action} label=${t("data.use")} onPress=${() => use(file)} />`}<${Action} label=${t("data.remove")} line=${asideLine(file)} onPress=${() => remove(`/api/data/${file.id}`).then(found.again)} /></div>`,
          ])}
        />
        ${!isOnlySeen && html`<${Removed} key=${files.map((file) => file.id).join()} onBack=${found.again} />`}`}
    <//>`;
}

/** Files that were taken off the list: each comes back, or is deleted for good. */
function Removed({ onBack }) {
  const found = useGet("/api/removed-data");
  const files = found.data?.data ?? [];
  if (!files.length) return html`<${Problem} error=${found.error} />`;
  const path = (file) => `/api/removed-data/${file.id}`;
  const title = t("data.aside", { n: files.length });
  return html`<details><summary>${title}</summary>
    <${Table}
      name=${title}
      head=${[t("data.name"), t("data.size"), t("data.created"), ""]}
      keys=${files.map((file) => file.id)}
      rows=${files.map((file) => [
        file.name,
        bytes(file.size),
        time(file.time),
        html`<div class="row"><${Action} label=${t("train.restore")} line=${file.restore} onPress=${() => post(`${path(file)}/restore`).then(onBack)} />
          <${Action} label=${t("data.delete")} confirm=${t("data.delete_sure")} line=${file.delete} onPress=${() => remove(path(file)).then(found.again)} /></div>`,
      ])}
    />
  </details>`;
}

/** Bars of a histogram: lengths up to a power of two. */
const Lengths = ({ histogram }) => {
  const most = Math.max(1, ...Object.values(histogram));
  return html`<div class="bars" role="img" aria-label=${t("data.lengths_words", { text: Object.entries(histogram).map(([length, n]) => `≤ ${length}: ${n}`).join(", ") })}>
    ${Object.entries(histogram).map(
      ([length, n]) => html`<div class="bar" key=${length}><span>≤ ${number(Number(length))}</span><div class="fill" style=${{ width: `${(100 * n) / most}%` }}></div><span class="number">${number(n)}</span></div>`,
    )}
  </div>`;
};

/** A problem of the job's data; where the columns fit no format, with a drop-down for each that is needed. */
function Wrong({ problem }) {
  const columns = columnsOf(problem);
  return html`<${Problem} error=${problem} isOfJob=${true} />${columns && html`<${NameColumns} of=${columns} />`}`;
}

/** What the columns of the job's sources are taken as; why they cannot be read is said by the audit. */
function Sources({ yaml }) {
  const { data } = useAnswer("/api/columns", { yaml });
  return html`${(data?.sources ?? []).map((source, i) => html`<${ColumnRoles} key=${JSON.stringify(source)} id=${`source-${i}`} source=${source} />`)}`;
}

function Audit({ yaml, stage }) {
  const { data, error, busy } = useAnswer("/api/audit", { yaml, stage });
  useEffect(() => {
    if (data?.ok && !stage && session().yaml === yaml) remember({ audited: true });
  }, [data]);
  if (busy) return html`<${Waiting} what=${t("data.auditing")} />`;
  if (error) return html`<${Wrong} problem=${error} />`;
  const problems = (data.errors ?? []).filter((problem) => !problem.repeats);
  const share = data.tokens ? data.trained_tokens / data.tokens : 0;
  return html`<div class="actions"><${Command} line=${data.command} /></div>
    ${problems.map((problem) => html`<${Wrong} key=${problem.message} problem=${problem} />`)}
    ${data.ok && html`<p class="note" role="status">${data.columns ? t("data.log_ok", { n: data.rows_used }) : data.prompts ? t("data.prompts_ok", { n: data.rows_used }) : t("data.ok", { n: data.rows_used, share: percent(share) })}</p>`}
    ${data.columns && html`<${LogAudit} data=${data} />`}
    ${data.tokens !== undefined &&
    html`<div class="figures">
      <${Figure} id="rows_in" value=${number(data.rows_in)} />
      <${Figure} id="rows_used" value=${number(data.rows_used)} />
      <${Figure} id="rows_cut" value=${number(data.rows_cut)} level=${data.rows_cut > 0.1 * data.rows_in ? "warn" : ""} />
      <${Figure} id="rows_dropped" value=${number(data.rows_dropped)} level=${data.rows_dropped > 0.1 * data.rows_in ? "bad" : ""} />
      <${Figure} id="tokens" value=${number(data.tokens)} />
      ${!data.prompts && html`<${Figure} id="trained_tokens" value=${percent(share)} />`}
      <${Figure} id="duplicates" value=${number(data.duplicates)} />
      <${Figure} id="overlap" value=${number(data.evaluation_overlap)} level=${data.evaluation_overlap ? "bad" : ""} />
    </div>`}
    ${data.stop_token_trained !== undefined && !data.prompts && html`<p>${t(data.stop_token_trained ? "data.stop_trained" : "data.stop_untrained")}</p>`}
    <div class="split">
      ${data.length_histogram && html`<section><h2>${t("data.lengths")}</h2><${Lengths} histogram=${data.length_histogram} /></section>`}
      <section>
        ${Object.keys(data.reasons ?? {}).length > 0 &&
        html`<h2>${t("data.reasons")}</h2>
          <${Table} name=${t("data.reasons")} head=${[t("data.reason"), t("data.rows")]} rows=${Object.entries(data.reasons).map(([reason, n]) => [html`<${Said} text=${reason} />`, number(n)])} />
          <${Table} name=${t("data.dropped_rows")} head=${[t("data.source"), t("data.row"), t("data.reason")]} rows=${(data.dropped ?? []).slice(0, 50).map((row) => [row.source.split("/").pop(), number(row.row), html`<${Said} text=${row.reason} />`])} />`}
        ${(data.fields_ignored ?? []).length > 0 &&
        html`<h2>${t("data.ignored")}</h2>
          <${Table} name=${t("data.ignored")} head=${[t("data.field"), t("data.source"), t("data.rows")]} rows=${data.fields_ignored.map((one) => [html`<code>${one.field}</code>`, one.source.split("/").pop(), number(one.rows)])} />`}
      </section>
    </div>
    ${(data.samples ?? []).length > 0 &&
    html`<h2>${t("data.samples")}</h2><${RowList} rows=${data.samples} />`}`;
}

/** Whether a row of the job's data is one of an uploaded file: others have the same numbers. */
export const isOf = (row, file) => Boolean(file?.path) && row.source === file.path;

/** The JSON of an uploaded file's row, by the number that messages give it; throws where it is another row. */
export async function written(fileId, row) {
  const { rows } = await get(`/api/data/${fileId}/rows`, { row, limit: 1 });
  if (rows[0]?.row !== row || rows[0].problem) throw new Error(rows[0]?.problem || t("data.no_row", { row }));
  return rows[0].text; // not its value: numbers here are no 64-bit integers
}

/** A row of an uploaded file as it is written, to be changed in a new version. */
function EditRow({ fileId, row, isChanged, onChange }) {
  const [text, write] = useState(null);
  const [error, setError] = useState(null);
  const open = async () => write(await written(fileId, row));
  const keep = () => {
    try {
      JSON.parse(text);
      onChange(text);
      write(null);
      setError(null);
    } catch (caught) {
      setError(caught);
    }
  };
  if (text === null) return html`<button type="button" class="quiet" onClick=${() => open().catch(setError)}>${t(isChanged ? "data.edited" : "data.edit")}</button><${Problem} error=${error} />`;
  return html`<textarea class="code" rows="6" aria-label=${t("data.edit")} value=${text} onInput=${(event) => write(event.target.value)}></textarea>
    <div class="row"><button type="button" class="primary" onClick=${keep}>${t("data.keep")}</button><button type="button" class="quiet" onClick=${() => write(null)}>${t("ui.cancel")}</button></div>
    <${Problem} error=${error} />`;
}

function Rows({ yaml, stage, file, packed }) {
  const [found, set] = useState({ packed, list: [] });
  const drawn = found.packed === packed ? found.list : []; // rows, or packed sequences
  const [total, setTotal] = useState(null);
  const [error, setError] = useState(null);
  const [out, exclude] = useState(new Set());
  const [made, setMade] = useState(null);
  const [changed, change] = useState({});
  const end = useRef(null);
  const asked = useRef("");
  const more = async (from) => {
    const question = JSON.stringify([yaml, packed, from]);
    if (asked.current === question) return;
    asked.current = question;
    try {
      const { sequences, rows, total: all } = await post("/api/rows", { yaml, stage, offset: from, limit: packed ? PAGE.packed : PAGE.rows, packed });
      if (asked.current !== question) return; // another order is asked for by now
      const several = sequences ?? rows;
      set((old) => ({ packed, list: [...old.list.slice(0, from), ...several] }));
      setTotal(all ?? from + several.length + 1);
    } catch (caught) {
      if (asked.current !== question) return;
      asked.current = "";
      setError(caught);
    }
  };
  useEffect(() => {
    set({ packed, list: [] });
    setTotal(null);
    setError(null);
    more(0);
  }, [yaml, packed]);
  useEffect(() => {
    exclude(new Set());
    change({});
  }, [yaml, file?.id]);
  useEffect(() => {
    if (!end.current) return undefined;
    const watch = new IntersectionObserver((seen) => seen[0].isIntersecting && total !== null && drawn.length < total && more(drawn.length));
    watch.observe(end.current);
    return () => watch.disconnect();
  }, [drawn.length, total]);
  const toggle = (row) => {
    const next = new Set(out);
    if (!next.delete(row)) next.add(row);
    exclude(next);
  };
  const version = async () => {
    const next = await post(`/api/data/${file.id}/versions`, { exclude: [...out], edit: changed });
    const withFormat = await described(next);
    const job = session().yaml;
    const isUsed = job.includes(file.path);
    if (isUsed) rememberJob({ yaml: job.replaceAll(file.path, () => next.path), file: inPlaceOf(file, withFormat) });
    setMade({ ...next, isUsed });
    exclude(new Set());
    change({});
  };
  const changes = out.size + Object.keys(changed).length;
  const rows = packed ? drawn.flatMap((sequence) => sequence.rows) : drawn;
  const before = (row) => html`<label><input type="checkbox" checked=${isOf(row, file) && out.has(row.row)} disabled=${!isOf(row, file)} onChange=${() => toggle(row.row)} /> ${t("data.exclude")}</label> · `;
  const behind = (row, group) => isOf(row, file) && group[0] === row && html`<${EditRow} fileId=${file.id} row=${row.row} isChanged=${row.row in changed} onChange=${(value) => change({ ...changed, [row.row]: value })} />`;
  return html`<${Problem} error=${error} />
    <div class="row"><${Order} packed=${packed} id="data-order" /></div>
    <p class="hint">${t("tokens.legend")} ${total !== null && t("data.shown", { shown: drawn.length, n: total })}</p>
    ${changes > 0 && html`<${Action} label=${t("data.version", { n: changes })} kind="primary" onPress=${version} />`}
    ${rows.some((row) => !isOf(row, file)) && html`<p class="hint">${t("data.version_uploaded_only")}</p>`}
    ${made && html`<p class="note" role="status">${t(made.isUsed ? "data.version_used" : "data.version_made", { name: made.name })} ${made.changes.unreadable > 0 && t("data.version_unreadable", { n: made.changes.unreadable, rows: made.unreadable.map((one) => one.row).join(", ") })}</p>`}
    ${total === null && !error && html`<${Waiting} what=${t("data.reading")} />`}
    <div class="scroll" tabindex="0" role="group" aria-label=${t("data.tab.rows")}>
      ${packed ? html`<${Packed} sequences=${drawn} before=${before} behind=${behind} />` : html`<${RowList} rows=${drawn} before=${before} behind=${behind} />`}
      <div ref=${end}></div>
    </div>`;
}

/** The stage whose data is shown. */
const StageOf = ({ names, stage }) =>
  html`<div class="row"><label for="data-stage">${t("job.stage")}</label>
    <select id="data-stage" value=${stage} onChange=${(event) => go({ query: { stage: event.target.value } }, { replace: true })}>${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select>
  </div>`;

export default function Data({ route, me }) {
  const state = useSession();
  const yaml = useSettled(state.yaml, SETTLED);
  const isOnlySeen = me?.role === "see"; // audits and rows are results of commands, which this role may not run
  const tab = isOnlySeen ? "files" : route.tab || (yaml ? "audit" : "files");
  const names = stageNames(yaml);
  const stage = names.includes(route.query.stage) ? route.query.stage : names[0]; // undefined in a job without stages
  const tabs = ["files", ...(isOnlySeen ? [] : ["audit", ...(hasTokens(taskOf(yaml)) ? ["rows"] : [])])].map((name) => [name, t(`data.tab.${name}`)]);
  return html`<h1>${t("place.data")}</h1>
    <${Tabs} items=${tabs} current=${tab} name=${t("place.data")} />
    ${tab === "files"
      ? html`<${Files} isOnlySeen=${isOnlySeen} />`
      : !yaml
        ? html`<${NothingYet} title=${t("job.none")} text=${t("job.none_text")} />`
        : html`${stage && html`<${StageOf} names=${names} stage=${stage} />`}
            ${tab === "rows" ? html`<${Rows} key=${stage} yaml=${yaml} stage=${stage} file=${state.file} packed=${route.query.packed === "1"} />` : html`${!stage && html`<${Sources} yaml=${yaml} />`}<${Audit} yaml=${yaml} stage=${stage} />`}`}
    ${yaml && tab !== "files" && html`<div class="actions"><a class="button" href=${link({ place: "start", run: "job", tab: "" })}>${t("data.back")}</a><a class="button primary" href=${link({ place: "plan", run: "", tab: "" })}>${t("data.next")}</a></div>`}`;
}
