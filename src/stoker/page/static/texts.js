// The texts that the program writes for terminals (problems of a job, reasons, meanings of keys), in another language.
//
// A table has a form for each text: the English text as in the source, with `{name}` for each value. A text is recognised
// by the form with the same letters. A value that is itself a text is translated in the same way. A single word is not
// translated, as it is what the user has to type, unless the translation has `{name~}` for it.

const HOLE = /\{(\w+)\}/g;
const WORDS = /[a-z]{2,} [a-z]{2,}/; // outside of quotes: what a person has to read
const QUOTED = /`[^`]*`|"[^"]*"|'[^']*'|\[[^\]]*\]|\b[A-Z]\w+ et al\./g;
const HAN = /[\u4e00-\u9fff]/;
const MARK = /[\u3000-\u303f\uff00-\uffef]/; // Chinese punctuation, which has its own space
const FEW = 4; // letters; a form with fewer joins two texts, as `{1} or {2}`
const SURE = 12; // letters; with fewer a form may be met by chance: its values must be known too
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** A table made ready: texts without values, and forms with the most letters first. */
export function prepared(table) {
  const exact = new Map();
  const forms = [];
  for (const [form, text] of Object.entries(table)) {
    const parts = form.split(HOLE); // literal, name, literal, ...
    const literals = parts.filter((_, i) => i % 2 === 0);
    if (parts.length === 1) {
      exact.set(form, text);
      continue;
    }
    const weight = literals.join("").replace(/[^\p{L}]/gu, "").length;
    const isQuoted = (i) => literals[i].endsWith("`") && literals[i + 1].startsWith("`");
    const hole = (i) => (isQuoted(i) ? "([^`]*)" : weight < FEW ? "([^]+?)" : "([^]*?)");
    const pattern = new RegExp(`^${literals.map((each, i) => escaped(each) + (i < literals.length - 1 ? hole(i) : "")).join("")}$`);
    const needle = literals.reduce((longest, each) => (each.length > longest.length ? each : longest));
    const length = literals.join("").length;
    forms.push({ names: parts.filter((_, i) => i % 2), text, weight, length, needle, pattern });
  }
  forms.sort((a, b) => b.weight - a.weight || b.length - a.length);
  return { exact, forms, known: new Map() };
}

/** A text in the language of a table; undefined where the table does not have it. */
export function inTable(table, text) {
  if (!table.known.has(text)) table.known.set(text, table.exact.get(text) ?? byForm(table, text));
  return table.known.get(text);
}

function byForm(table, text) {
  let guess; // by a form with a value that is not known
  for (const { names, text: said, weight, needle, pattern } of table.forms) {
    const match = text.includes(needle) && pattern.exec(text);
    if (!match) continue;
    const given = match.slice(1);
    const isText = (value, i) => /\s/.test(value) || said.includes(`{${names[i]}~}`);
    const values = given.map((value, i) => (isText(value, i) && inTable(table, value)) || value);
    const isJoint = weight > 0 || values.some((value, i) => value !== given[i]);
    const isRead = given.every((value, i) => isWhole(value) && (!value.trim() || values[i] !== value || !WORDS.test(value.replace(QUOTED, ""))));
    const inWords = () => filled(said, Object.fromEntries(names.map((name, i) => [name, values[i]])));
    if (isRead && (weight >= FEW || isJoint)) return inWords();
    if (weight >= SURE) guess ??= inWords();
  }
  return guess;
}

/** Whether no quotation begins or ends outside of a value. */
const isWhole = (value) => ["`", '"'].every((mark) => value.split(mark).length % 2) && value.startsWith("'") === value.endsWith("'");

/** A text with its values; between two Chinese characters, and beside Chinese punctuation, no space is left. */
const filled = (text, values) =>
  text.replace(/( ?)\{(\w+)~?\}( ?)/g, (whole, before, name, after, at) => {
    const value = values[name];
    const isClose = (one = "", other = "") => MARK.test(one) || MARK.test(other) || (HAN.test(one) && HAN.test(other));
    const left = isClose(text[at - 1], value[0]) ? "" : before;
    const right = isClose(value.at(-1), text[at + whole.length]) ? "" : after;
    return `${left}${value}${right}`;
  });
