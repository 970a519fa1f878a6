// Reads texts as JSON and writes what the page says for each in Chinese; null where it has nothing.
import { readFileSync } from "node:fs";
import { inTable, prepared } from "../../src/stoker/page/static/texts.js";

const table = prepared(JSON.parse(readFileSync(new URL("../../src/stoker/page/static/texts.zh.json", import.meta.url))));
const texts = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(texts.map((text) => inTable(table, text) ?? null)));
