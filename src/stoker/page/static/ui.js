// Small parts that every place is made of.
import { folderName } from "./folder_name.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { failureOf, said, spoken, t } from "./i18n.js";
import { link } from "./router.js";

/** Copies a text; says so for two seconds. */
export function Copy({ text, label }) {
  const [done, set] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    set(true);
    setTimeout(() => set(false), 2000);
  };
  const name = label ?? t("ui.copy");
  return html`<button type="button" class="quiet" onClick=${copy} aria-label=${`${name}: ${text}`}>
    <span aria-live="polite">${done ? t("ui.copied") : name}</span>
  </button>`;
}

/** The command that does the same, copyable. */
export const Command = ({ line }) =>
  line &&
  html`<div class="command">
    <code tabindex="0" role="group" aria-label=${t("ui.command")}><span class="prompt" aria-hidden="true">$ </span>${line}</code>
    <${Copy} text=${line} />
  </div>`;

/**
 * A button that is a verb: beside it, `$` shows the command line that does the same. While its promise is open the
 * button says so and cannot be pressed again; an error is shown below it. The button is not `disabled` then, as it would
 * lose the focus. Escape takes back a first press that is to be confirmed.
 */
export function Action({ label, line, onPress, kind = "", disabled = false, reason = "", confirm = "", id }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const [open, setOpen] = useState(false);
  const [sure, setSure] = useState(false);
  const button = useRef(null);
  const cancel = () => (setSure(false), button.current.focus());
  const press = async () => {
    if (busy) return undefined;
    if (confirm && !sure) return setSure(true);
    setSure(false);
    setBusy(true);
    setError(null);
    try {
      await onPress();
    } catch (caught) {
      setError(caught);
    }
    return setBusy(false);
  };
  return html`<div class="action">
    <div class="row" onKeyDown=${(event) => sure && event.key === "Escape" && cancel()}>
      <button type="button" ref=${button} id=${id} class=${sure ? "danger" : kind} onClick=${press} disabled=${disabled && !busy} aria-disabled=${busy || disabled} title=${disabled ? reason : ""}>
        ${busy ? t("ui.working", { what: label }) : sure ? confirm : label}
      </button>
      ${sure && html`<button type="button" class="quiet" onClick=${cancel}>${t("ui.cancel")}</button>`}
      ${line &&
      html`<button type="button" class="quiet line-toggle" aria-expanded=${open} aria-label=${t("ui.show_command", { what: label })} onClick=${() => setOpen(!open)}>
        <span aria-hidden="true">$</span>
      </button>`}
    </div>
    ${disabled && reason && html`<p class="hint">${reason}</p>`}
    ${open && html`<${Command} line=${line} />`}
    <${Problem} error=${error} />
  </div>`;
}

const JOB_PLACES = ["", "job.yaml", "command line"]; // the `file` of errors in the job and its overrides

/** The place of an error: its line, or a file that the job names, with the line if it has one. */
export function problemPlace({ file = "", line = 0 }) {
  const name = JOB_PLACES.includes(file) ? "" : file.split("/").pop();
  return name && line ? t("ui.at_line_of", { file: name, line }) : name || (line ? t("ui.at_line", { line }) : "");
}

/** An error of the server in words, with its hint and place; with `isOfJob` a line of the job leads to its editor. */
export function Problem({ error, isOfJob = false }) {
  if (!error) return null;
  const { line, file } = error;
  const place = problemPlace(error);
  const isInJob = isOfJob && line && file === "job.yaml";
  return html`<div class="problem" role="alert"><${Spoken} error=${error} place=${isInJob ? html`<a href=${link({ place: "start", run: "job", tab: "", query: { line } })}>${place}</a>` : place} /></div>`;
}

/** What is wrong and what to do, in the page's language; what is known in English only is marked as such. */
export function Spoken({ error, place = "" }) {
  const { message, hint, isEnglish } = spoken(error);
  const lang = isEnglish ? "en" : undefined;
  return html`${isEnglish && html`<span class="hint">${t("ui.in_english")} </span>`}<strong lang=${lang}>${message}</strong> ${place} ${hint && html`<p lang=${lang}>${hint}</p>`}`;
}

/** What a command wrote to stderr: its errors in the page's language, and everything else as it is. */
export function Failure({ text }) {
  const lines = text.split("\n");
  const errors = lines.map(failureOf).filter(Boolean);
  const rest = lines.filter((line) => !failureOf(line)).join("\n").trim();
  return html`${errors.map((error) => html`<${Problem} key=${error.message} error=${error} />`)}
    ${rest && html`<pre class="log problem" role="alert" lang="en" tabindex="0">${rest}</pre>`}`;
}

/** A text of the program in the page's language, or marked as English. */
export function Said({ text }) {
  const { text: found, isEnglish } = said(text ?? "");
  return isEnglish ? html`<span lang="en">${found}</span>` : found;
}

/** An empty state teaches the next step with a button. */
export const Empty = ({ title, text, children }) =>
  html`<div class="empty"><h2>${title}</h2>${text && html`<p>${text}</p>`}<div class="row centre">${children}</div></div>`;

/** The empty state of what needs a job first. */
export const NothingYet = ({ title, text }) =>
  html`<${Empty} title=${title} text=${text}><a class="button primary" href=${link({ place: "start", run: "" })}>${t("job.pick_recipe")}</a><//>`;

/** A word for waiting; after ten seconds how long it has been. */
export function Waiting({ what }) {
  const [seconds, set] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => set((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, []);
  const text = what ?? t("ui.loading");
  return html`<p class="waiting" role="status">${text}${seconds >= 10 && ` ${t("ui.for_seconds", { n: seconds })}`}</p>`;
}

/** What a `useGet` has: its error, a word while it is open, or the children made from its data. */
export const Loaded = ({ of, children, what }) =>
  html`<${Problem} error=${of.error} />${of.data ? children(of.data) : of.error ? null : html`<${Waiting} what=${what} />`}`;

/** Tabs are addresses: links, so that they can be shared, opened beside and walked with the keyboard. */
export const Tabs = ({ items, current, name }) =>
  html`<nav class="tabs" aria-label=${name}>
    ${items.map(
      ([tab, label]) => html`<a key=${tab} href=${link({ tab, query: {} })} aria-current=${tab === current ? "page" : undefined}>${label}</a>`,
    )}
  </nav>`;

/** A labelled control of a form; `id` ties them together. */
export const Field = ({ id, label, hint, children }) =>
  html`<div class="field"><label for=${id}>${label}</label>${children}${hint && html`<p class="hint" id=${`${id}-hint`}>${hint}</p>`}</div>`;

/**
 * A text field: what is typed stays while it has the focus, whatever is drawn meanwhile. `onChange` as of an input.
 * With `isKept` it stays also afterwards, until the value changes or is no longer wrong.
 */
export function Text({ value, isKept = false, isWrong = false, onInput, ...rest }) {
  const [typed, type] = useState(null);
  const hasFocus = useRef(false);
  useEffect(() => {
    if (!hasFocus.current && !isWrong) type(null);
  }, [value, isWrong]);
  const leave = () => {
    hasFocus.current = false;
    if (!isKept || typed === String(value)) type(null);
  };
  return html`<input ...${rest} value=${typed ?? value} onInput=${(event) => (type(event.target.value), onInput?.(event))} onFocus=${() => (hasFocus.current = true)} onBlur=${leave} />`;
}

/** A field for the name of a folder: its hint shows what the text becomes, which replaces it when the field is left. */
export function FolderName({ id, label, value, onChange }) {
  const [typed, type] = useState("");
  const becomes = folderName(typed);
  const hint = becomes === typed ? t("ui.folder_hint") : becomes ? t("ui.folder_becomes", { name: becomes }) : t("ui.folder_without");
  const leave = (event) => (onChange(folderName(event.target.value)), type(""));
  return html`<${Field} id=${id} label=${label} hint=${hint}>
    <${Text} id=${id} value=${value} aria-describedby=${`${id}-hint`} onInput=${(event) => type(event.target.value)} onChange=${leave} />
  <//>`;
}

/** A status as a word with a sign; never by colour alone. */
export const Status = ({ status }) => {
  const level = { running: "go", done: "ok", failed: "bad", stopped: "warn", interrupted: "warn", unreadable: "bad" }[status] ?? "";
  return html`<span class=${`status ${level}`}>${t(`status.${status}`)}</span>`;
};

/** A bar from 0 to 1 with its words. */
export const Progress = ({ value, label }) =>
  html`<span class="progress"><progress max="1" value=${value || 0} aria-label=${label}></progress></span>`;

/** A table that scrolls sideways by itself, reachable by keyboard. `keys` are the ids of rows whose cells have a state. */
export const Table = ({ name, head, rows, empty, keys }) =>
  html`<div class="table" role="group" aria-label=${name} tabindex="0">
    <table>
      <caption class="hidden">${name}</caption>
      <thead><tr>${head.map((cell, i) => (cell === "" ? html`<td key=${i}></td>` : html`<th key=${i} scope="col">${cell}</th>`))}</tr></thead>
      <tbody>${rows.map((cells, i) => html`<tr key=${keys ? keys[i] : i}>${cells.map((cell, j) => html`<td key=${j}>${cell}</td>`)}</tr>`)}</tbody>
    </table>
    ${!rows.length && empty && html`<p class="hint">${empty}</p>`}
  </div>`;

/** Calls a function after `wait` ms, or where the tab is hidden as soon as it is shown; returns what cancels it. */
export function whenShown(action, wait) {
  const look = () => document.hidden || action();
  const timer = setTimeout(look, wait);
  document.addEventListener("visibilitychange", look);
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
}

/** A value as it was when nothing had changed for `wait` ms in a tab that is shown; the first one at once. */
export function useSettled(value, wait) {
  const [settled, set] = useState(value);
  useEffect(() => (value === settled ? undefined : whenShown(() => set(value), wait)), [value, settled]);
  return settled;
}

/** Calls a function when nothing has changed for `wait` ms. */
export function useLater(action, wait, inputs) {
  const latest = useRef(action);
  latest.current = action;
  useEffect(() => {
    const timer = setTimeout(() => latest.current(), wait);
    return () => clearTimeout(timer);
  }, inputs);
}
