// Files go up in pieces; a broken connection or a reload of the page goes on where the server stopped.
import { ApiError, get, patchRaw, post } from "./api.js";
import { html, useState } from "./html.js";
import { bytes, percent, t } from "./i18n.js";
import { Problem, Progress } from "./ui.js";

export const PIECE = 4 * 1024 * 1024; // bytes a request
/** The endings of files that the server reads, for the choosers of files. */
export const DATA_FILES = ".jsonl,.ndjson,.json,.csv,.tsv,.parquet,.txt,.md,.tar,.svm,.libsvm,.ffm,.libffm,.gz,.zst";
const DIGESTED = 16; // pieces of a file at most, by which it is recognised
const TRIES = 6; // in a row without a byte of progress
const KEY = "stoker.uploads";

const remembered = () => JSON.parse(localStorage.getItem(KEY) ?? "{}");

/** The offsets of the pieces that a file's digest is computed from: all of them, or in a large file the first, the last and some between. */
export function digested(size) {
  const pieces = Math.ceil(size / PIECE);
  const count = Math.min(pieces, DIGESTED);
  return Array.from({ length: count }, (_, i) => PIECE * Math.round((i * (pieces - 1)) / Math.max(1, count - 1)));
}

/** A key of a file by its name, size, time and content. `crypto.subtle` is not available over plain HTTP. */
async function mark(file) {
  let [a, b] = [0xdeadbeef, 0x41c6ce57]; // cyrb53, without its last mixing
  for (const start of digested(file.size)) {
    for (const byte of new Uint8Array(await file.slice(start, start + PIECE).arrayBuffer())) {
      a = Math.imul(a ^ byte, 2654435761);
      b = Math.imul(b ^ byte, 1597334677);
    }
  }
  return `${file.name}/${file.size}/${file.lastModified}/${a >>> 0}/${b >>> 0}`;
}

/** Begins an upload, or finds where an earlier one of the same file stopped, or that it is whole. */
async function begin(file) {
  const key = await mark(file);
  const known = remembered()[key];
  if (known) {
    try {
      return { ...(await get(`/api/uploads/${known}`)), id: known };
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // the server has forgotten it: begin again
    }
  }
  const begun = await post("/api/uploads", { name: file.name, size: file.size });
  localStorage.setItem(KEY, JSON.stringify({ ...remembered(), [key]: begun.id }));
  return begun;
}

/** Sends a file; `onProgress(sent, size, retrying)`. Returns the server's id of it. */
export async function upload(file, onProgress, pause = (ms) => new Promise((done) => setTimeout(done, ms))) {
  const begun = await begin(file);
  let offset = begun.offset ?? 0;
  const piece = Math.min(PIECE, begun.chunk ?? PIECE);
  let failures = 0;
  while (offset < file.size) {
    try {
      const answer = await patchRaw(`/api/uploads/${begun.id}`, { offset }, file.slice(offset, offset + piece));
      offset = answer.offset;
      failures = 0;
      onProgress(offset, file.size, false);
    } catch (error) {
      failures += 1;
      const isRefused = error instanceof ApiError && error.status < 500 && ![408, 409].includes(error.status);
      if (isRefused || failures >= TRIES) throw error;
      onProgress(offset, file.size, true);
      await pause(500 * 2 ** failures);
      offset = (await get(`/api/uploads/${begun.id}`).catch(() => ({ offset }))).offset;
    }
  }
  return begun.id;
}

/** An uploaded file with the columns and the format of its first rows. */
export const described = async (file) => ({ ...file, ...(await get(`/api/data/${file.id}/format`)) });

/** A file together with those that were chosen with it before: a job's data are all of them. A file without readable rows is left out. */
export function withFormer(former, file) {
  const files = [...(former ? (former.files ?? [former]) : []), file].filter((each) => !each.problem);
  return files.length > 1 ? { ...files.at(-1), files: files.map(({ name, path }) => ({ name, path })) } : (files[0] ?? file);
}

/** A file that replaces a former one, also among the files that were chosen with that. */
export function inPlaceOf(former, file) {
  const { name, path } = file;
  return former.files ? { ...file, files: former.files.map((each) => (each.path === former.path ? { name, path } : each)) } : file;
}

/** The value of a job's `data` for an uploaded file, or for several. */
export const sourceOf = (file) => (file.files ? file.files.map(({ path }) => path) : file.path);
export const namedTogether = (file) => (file.files ?? [file]).map(({ name }) => name).join(", ");

/** A place to drop files on, or to choose one with the keyboard; calls `onBegin()`, and `onDone(id, file)` for each, or `onFiles(files)` once. */
export function Drop({ id, label, hint, accept, onBegin, onDone, onFiles }) {
  const [over, setOver] = useState(false);
  const [state, set] = useState(null);
  const [error, setError] = useState(null);
  const take = async (files) => {
    setError(null);
    if (onFiles) return onFiles(files).catch(setError);
    if (files.length) onBegin?.();
    for (const file of files) {
      try {
        set({ name: file.name, sent: 0, size: file.size });
        const made = await upload(file, (sent, size, retrying) => set({ name: file.name, sent, size, retrying }));
        await onDone(made, file);
      } catch (caught) {
        setError(caught);
      }
      set(null);
    }
    return undefined;
  };
  const chosen = (event) => {
    const files = [...event.target.files];
    event.target.value = ""; // else the same file, corrected, is no change
    take(files);
  };
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    take([...event.dataTransfer.files]);
  };
  return html`<div
    class=${`drop ${over ? "over" : ""}`}
    id=${`${id}-zone`}
    onDragOver=${(event) => (event.preventDefault(), setOver(true))}
    onDragLeave=${() => setOver(false)}
    onDrop=${drop}
  >
    <p id=${`${id}-label`}>${label}</p>
    <p>
      <input id=${id} class="hidden" type="file" accept=${accept} multiple aria-describedby=${`${id}-label`} onChange=${chosen} />
      <label class="button" for=${id}>${t("upload.choose")}</label>
    </p>
    <p class="hint">${hint}</p>
    <div aria-live="polite">
      ${state &&
      html`<p>
        ${t(state.retrying ? "upload.retrying" : "upload.sending", { name: state.name })}
        <${Progress} value=${state.size ? state.sent / state.size : 1} label=${state.name} />
        ${percent(state.size ? state.sent / state.size : 1, 0)} · ${bytes(state.size)}
      </p>`}
    </div>
    <${Problem} error=${error} />
  </div>`;
}
