// The texts of the page: a table of messages for each language, and numbers, sizes, times and plurals by locale.
import { inTable, prepared } from "./texts.js";

export const LANGUAGES = ["en", "zh"];
const LOCALES = { en: "en-GB", zh: "zh-CN" };
const tables = {};
const texts = {}; // what the program writes in English, by language
let arrived = () => {};
let language = "en";

/** The language that the browser asks for, or English. */
export function preferred(wanted = navigator.languages || [navigator.language]) {
  for (const tag of wanted) {
    const found = LANGUAGES.find((name) => String(tag).toLowerCase().startsWith(name));
    if (found) return found;
  }
  return "en";
}

/** Fetches a language's table once and makes it the page's; that of the program's texts follows by itself. */
export async function setLanguage(name) {
  if (!LANGUAGES.includes(name)) name = "en";
  const load = async (file) => (await fetch(new URL(`${file}.${name}.json`, import.meta.url))).json();
  const isFirst = !(name in tables);
  tables[name] ??= await load("messages");
  useTable(name, tables[name]);
  if (isFirst && name !== "en") load("texts").then((table) => (useTexts(name, table), arrived()), () => {});
}

/** What is done once the program's texts of a language are there. */
export const onTexts = (act) => (arrived = act);

/** Makes a table that of the program's texts in a language; the tests hand theirs in. */
export const useTexts = (name, table) => (texts[name] = prepared(table));

/** Makes a table the page's; a report and the tests hand theirs in. */
export function useTable(name, table) {
  tables[name] = table;
  language = name;
  if (typeof document !== "undefined") document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
}

export const currentLanguage = () => language;
const locale = () => LOCALES[language];

/** Whether the table has a message of this key. */
export const has = (key) => key in tables[language] || `${key}.other` in tables[language];

/**
 * The message of a key; `{name}` in it is replaced by an argument, numbers as the locale writes them. Of `KEY.one` and
 * `KEY.other`, the plural rule of the argument `n` chooses. An unknown key is shown as it is.
 */
export function t(key, args = {}) {
  const table = tables[language] ?? {};
  let message = table[key];
  if (message === undefined && args.n !== undefined) {
    const rule = new Intl.PluralRules(locale()).select(Number(args.n));
    message = table[`${key}.${rule}`] ?? table[`${key}.other`];
  }
  return message === undefined ? key : filled(message, args);
}

/** A text with `{name}` replaced by arguments, numbers as the locale writes them. */
const filled = (text, args) =>
  text.replace(/\{(\w+)\}/g, (whole, name) => {
    const value = args[name];
    if (value === undefined || value === null) return whole;
    return typeof value === "number" ? number(value) : String(value);
  });

const UPLOADED = /[^\s"'`]*\/uploads\/[0-9a-f]{16}\//g; // the folder of an uploaded file

/** A text of the program in the page's language: {text, isEnglish}, as it is where the language does not have it. Uploaded files have their names alone. */
export function said(text) {
  const found = texts[language] && text ? inTable(texts[language], text) : undefined;
  return { text: (found ?? text)?.replace(UPLOADED, ""), isEnglish: language !== "en" && found === undefined && /[a-z]/i.test(text) };
}

/** An error in the page's language: {message, hint, isEnglish}. Errors of the page's own modules are in its language already. */
export function spoken(error) {
  const { message } = error;
  const hint = error.hint ?? error.suggestion ?? "";
  if (error instanceof Error && error.status === undefined) return { message, hint, isEnglish: false };
  const [one, other] = [said(message), said(hint)];
  return { message: one.text, hint: other.text, isEnglish: one.isEnglish || other.isEnglish };
}

/** The error of a line that a command wrote, `error: FILE:LINE:COLUMN: MESSAGE; HINT`; null for another line. */
export function failureOf(line) {
  const found = /^error: (?:(.*?):(\d+):\d+: )?(.*)$/.exec(line);
  if (!found) return null;
  const [, file = "", at = "0", text] = found;
  const parts = text.split("; "); // a message may have one as well
  const error = (n) => ({ message: parts.slice(0, n).join("; "), hint: parts.slice(n).join("; "), file, line: Number(at) });
  const known = parts.map((_, i) => error(i + 1)).find((one) => !spoken(one).isEnglish);
  return known ?? error(parts.length);
}

/** A number with about `digits` significant digits; small and large ones with an exponent. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(Number(value))) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return Number(value).toExponential(Math.min(2, digits - 1));
  if (Number.isInteger(value)) return new Intl.NumberFormat(locale()).format(value || 0); // -0 is 0
  return new Intl.NumberFormat(locale(), { maximumSignificantDigits: digits }).format(value);
}

/** Labels of an axis at these values, `step` apart: as many decimals as tell them apart. Shares are percentages. */
export function ticks(values, step, isShare = false) {
  const scale = isShare ? 100 : 1;
  const apart = step * scale;
  const order = Math.floor(Math.log10(apart) + 1e-9);
  const isWhole = Math.abs(apart / 10 ** order - Math.round(apart / 10 ** order)) < 1e-6; // 2.5 has a digit more
  const last = isWhole ? order : order - 1; // the last digit's power of ten
  const decimals = Math.min(20, Math.max(0, -last));
  const form = new Intl.NumberFormat(locale(), { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  const most = Math.max(...values.map((value) => Math.abs(value ?? 0))) * scale;
  const isExponent = most !== 0 && (most < 1e-3 || most >= 1e9);
  return values.map((value) => {
    if (value === null || value === undefined) return "";
    const shown = value * scale;
    if (isExponent && shown === 0) return "0";
    if (!isExponent) return `${form.format(shown)}${isShare ? "%" : ""}`;
    return shown.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(shown))) - last));
  });
}

/** A share of one as a percentage. */
export function percent(value, digits = 1) {
  if (value === null || value === undefined || !Number.isFinite(Number(value))) return "–";
  const style = { style: "percent", maximumFractionDigits: digits };
  return new Intl.NumberFormat(locale(), style).format(value);
}

/** Bytes in binary units. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, 3)} ${units[unit]}`;
}

/** Gibibytes, as the planner gives them. */
export const gib = (value) => (value === null || value === undefined ? "–" : `${number(value, 3)} GiB`);

/** Seconds as h:mm:ss or m:ss, the same in every language. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(Number(seconds))) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** A date with its time of day; `seconds` since 1970. */
export const dated = (seconds) => new Intl.DateTimeFormat(locale(), { dateStyle: "medium", timeStyle: "short" }).format(new Date(seconds * 1000));

/** A time of day, with its date where that is not today; `seconds` since 1970. */
export function time(seconds) {
  if (!seconds) return "–";
  const moment = new Date(seconds * 1000);
  const today = moment.toDateString() === new Date().toDateString();
  return today ? new Intl.DateTimeFormat(locale(), { timeStyle: "medium" }).format(moment) : dated(seconds);
}
