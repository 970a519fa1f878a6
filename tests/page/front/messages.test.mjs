// Both languages say the same things, every message that a module asks for is there, and no module has words of its own.
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import test from "node:test";

const STATIC = new URL("../../../src/stoker/page/static/", import.meta.url);
const read = (name) => readFileSync(new URL(name, STATIC), "utf8");
const table = (name) => JSON.parse(read(`messages.${name}.json`));
const [en, zh] = [table("en"), table("zh")];
const glossary = JSON.parse(read("glossary.json"));
const modules = readdirSync(STATIC).filter((name) => name.endsWith(".js")).map((name) => [name, read(name)]);
const placeholders = (text) => [...text.matchAll(/\{(\w+)\}/g)].map((found) => found[1]).sort();
const isPlural = (key) => /\.(one|other)$/.test(key) && `${key.replace(/\.\w+$/, "")}.one` in en;
const base = (key) => (isPlural(key) ? key.replace(/\.\w+$/, "") : key);
const known = new Set([...Object.keys(en), ...Object.keys(en).map(base)]);

test("the tables have the same keys", () => assert.deepEqual(Object.keys(en).sort(), Object.keys(zh).sort()));

test("a message has the same placeholders in both languages", () => {
  for (const key of Object.keys(en)) {
    const union = (of) => [...new Set(isPlural(key) ? ["one", "other"].flatMap((rule) => placeholders(of[`${base(key)}.${rule}`])) : placeholders(of[key]))].sort();
    assert.deepEqual(union(zh), union(en), key);
  }
});

test("plural messages have both rules", () => {
  for (const key of Object.keys(en)) if (/\.one$/.test(key)) assert.ok(`${base(key)}.other` in en, key);
});

test("Chinese messages are Chinese, but for names", () => {
  const same = Object.keys(en).filter((key) => en[key] === zh[key] && /[a-z]/i.test(en[key].replace(/\{\w+\}/g, "")));
  assert.deepEqual(same.sort(), ["app.name", "format.gguf", "language.en"]);
});

test("every message that a module names exists", () => {
  for (const [name, source] of modules) {
    for (const [, key] of source.matchAll(/\bt\(\s*"([\w.-]+)"/g)) assert.ok(known.has(key), `${name}: ${key}`);
    for (const [, a, b] of source.matchAll(/\bt\([^()?"`]*\?\s*"([\w.-]+)"\s*:\s*"([\w.-]+)"/g)) for (const key of [a, b]) assert.ok(known.has(key), `${name}: ${key}`);
    for (const [, prefix] of source.matchAll(/\bt\(`([\w.]+\.)\$\{/g)) assert.ok([...known].some((key) => key.startsWith(prefix)), `${name}: ${prefix}`);
  }
});

test("every message is used", () => {
  const all = modules.map(([, source]) => source).join("\n");
  const prefixes = [...all.matchAll(/`([\w.]+\.)\$\{/g)].map((found) => found[1]);
  const groups = ["part.", "health."]; // named by what the server answers
  for (const key of known) {
    const isUsed = all.includes(`"${key}"`) || prefixes.some((prefix) => key.startsWith(prefix)) || groups.some((group) => key.startsWith(group));
    assert.ok(isUsed || isPlural(key), key);
  }
});

/** The literal parts of every html`...` of a source, with `${...}` taken out at any depth. */
function templates(source) {
  const found = [];
  for (let at = source.indexOf("html`"); at >= 0; at = source.indexOf("html`", at + 5)) {
    if (/[\w.]/.test(source[at - 1] ?? "")) continue; // the end of a file's name
    let text = "";
    let i = at + 5;
    for (; i < source.length && source[i] !== "`"; i += 1) {
      if (source[i] === "$" && source[i + 1] === "{") {
        i = closing(source, i + 1);
        text += "\0";
      } else text += source[i];
    }
    found.push(text);
  }
  return found;
}

/** The place of the brace that closes the one at `at`, over nested templates and strings. */
function closing(source, at) {
  let depth = 0;
  for (let i = at; i < source.length; i += 1) {
    const c = source[i];
    if (c === '"') while (source[(i += 1)] !== '"') if (source[i] === "\\") i += 1;
    if (c === "`") {
      for (i += 1; source[i] !== "`"; i += 1) if (source[i] === "$" && source[i + 1] === "{") i = closing(source, i + 1);
      continue;
    }
    if (c === "{") depth += 1;
    if (c === "}" && (depth -= 1) === 0) return i;
  }
  throw new Error("a brace is not closed");
}

test("no module has words of its own", () => {
  for (const [name, source] of modules) {
    for (const text of templates(source)) {
      const words = text.replace(/<[^<>]*>/g, "\0").split("\0").filter((part) => /\p{L}{2}/u.test(part));
      assert.deepEqual(words, [], name);
      for (const [, attribute, value] of text.matchAll(/(aria-label|title|placeholder|alt|label)="([^"]*)"/g)) {
        assert.fail(`${name}: ${attribute}="${value}"`);
      }
    }
  }
});

test("the test above finds words", () => {
  assert.deepEqual(templates('x = html`<p a=${"}"}>Hello ${`a${1}`} there</p>`'), ["<p a=\0>Hello \0 there</p>"]);
});

test("every entry of the glossary has its three sentences in both languages", () => {
  assert.equal(new Set(glossary.map((entry) => entry.id)).size, glossary.length);
  for (const { id, unit, formula, key } of glossary) {
    assert.ok(unit && formula && key, id);
    for (const part of ["name", "what", "healthy"]) for (const of of [en, zh]) assert.ok(of[`g.${id}.${part}`], `${id}.${part}`);
  }
  for (const key of Object.keys(en).filter((one) => one.startsWith("g."))) assert.ok(glossary.some((entry) => key.startsWith(`g.${entry.id}.`)), key);
});

test("every number that a module shows has an entry", () => {
  const ids = new Set(glossary.map((entry) => entry.id));
  for (const [name, source] of modules) for (const [, id] of source.matchAll(/<\$\{(?:Figure|Term)\} id="(\w+)"/g)) assert.ok(ids.has(id), `${name}: ${id}`);
});
