// Messages with arguments and plurals, numbers, sizes and times.
import assert from "node:assert/strict";
import test from "node:test";
import { ApiError } from "../../../src/stoker/page/static/api.js";
import { inUnit, setGlossary } from "../../../src/stoker/page/static/glossary.js";
import { bytes, duration, failureOf, has, number, percent, preferred, said, spoken, t, ticks, useTable, useTexts } from "../../../src/stoker/page/static/i18n.js";

const EN = { hello: "Hello {name}, {n} times", "rows.one": "{n} row", "rows.other": "{n} rows" };
const ZH = { hello: "{name}，{n} 次", "rows.one": "{n} 行", "rows.other": "{n} 行" };

test("arguments and plurals", () => {
  useTable("en", EN);
  assert.equal(t("hello", { name: "A", n: 1200 }), "Hello A, 1,200 times");
  assert.equal(t("rows", { n: 1 }), "1 row");
  assert.equal(t("rows", { n: 2 }), "2 rows");
  assert.equal(t("missing.key"), "missing.key");
  assert.equal(t("hello", { n: 1 }), "Hello {name}, 1 times");
  assert.ok(has("rows") && has("hello") && !has("other"));
  useTable("zh", ZH);
  assert.equal(t("rows", { n: 1 }), "1 行");
});

test("texts of the program are said in the page's language, others are marked as English", () => {
  const error = { message: "a.csv has no row 1,234", hint: "see a.csv" };
  useTexts("zh", { "{name} has no row {row}": "{name} 没有第 {row} 行", "see {name}": "参见 {name}", "a list": "列表", "it must be {1}, not {2}": "必须是 {1~}，而不是 {2}", text: "文本", "{1} or {2}": "{1} 或 {2}" });
  useTable("zh", ZH);
  assert.deepEqual(spoken(error), { message: "a.csv 没有第 1,234 行", hint: "参见 a.csv", isEnglish: false });
  assert.deepEqual(spoken({ message: error.message, suggestion: "" }), { message: "a.csv 没有第 1,234 行", hint: "", isEnglish: false });
  assert.deepEqual(spoken({ ...error, hint: "unknown to it" }), { message: "a.csv 没有第 1,234 行", hint: "unknown to it", isEnglish: true });
  assert.equal(spoken(new ApiError(400, { message: "no such key" })).isEnglish, true);
  assert.deepEqual(spoken(new ApiError(404, error)), spoken(error));
  assert.equal(spoken(new Error("没有这一行")).isEnglish, false);
  assert.equal(said("it must be text, not a list").text, "必须是文本，而不是列表");
  assert.equal(said("it must be 'a or b', not text").text, "必须是 'a or b'，而不是 text");
  assert.deepEqual(said("128"), { text: "128", isEnglish: false });
  assert.deepEqual(failureOf("error: job.yaml:3:7: a.csv has no row 5; see a.csv"), { message: "a.csv has no row 5", hint: "see a.csv", file: "job.yaml", line: 3 });
  assert.deepEqual(failureOf("error: unknown; to it"), { message: "unknown; to it", hint: "", file: "", line: 0 });
  assert.equal(failureOf("Traceback"), null);
  useTable("en", EN);
  assert.deepEqual(spoken(error), { message: error.message, hint: error.hint, isEnglish: false });
});

test("an uploaded file is named without its folder", () => {
  useTable("en", EN);
  const at = "/home/me/state/uploads/0123456789abcdef/";
  assert.equal(said(`a row of /data/x.jsonl: cannot read \`${at}my rows (1).jsonl\`, see ${at}b.csv`).text, "a row of /data/x.jsonl: cannot read `my rows (1).jsonl`, see b.csv");
  assert.equal(spoken({ message: `${at}a.csv has no row 5` }).message, "a.csv has no row 5");
  assert.equal(said(undefined).text, undefined);
});

test("numbers", () => {
  useTable("en", EN);
  assert.equal(number(1234567), "1,234,567");
  assert.equal(number(0.123456), "0.1235");
  assert.deepEqual([0, -0].map((value) => number(value)), ["0", "0"]);
  assert.equal(number(2e-5), "2.00e-5");
  assert.equal(number(null), "–");
  assert.equal(number(Number.NaN), "–");
  assert.equal(percent(0.971), "97.1%");
  assert.equal(bytes(1536), "1.5 KiB");
  assert.equal(bytes(0), "0 B");
  assert.equal(duration(21), "0:21");
  assert.equal(duration(3661), "1:01:01");
  assert.equal(duration(undefined), "–");
});

test("labels of an axis can be told apart", () => {
  useTable("en", EN);
  assert.deepEqual(ticks([2.34, 2.342, 2.344], 0.002), ["2.340", "2.342", "2.344"]);
  assert.deepEqual(ticks([12345.5, 12346, 12346.5], 0.5), ["12,345.5", "12,346.0", "12,346.5"]);
  assert.deepEqual(ticks([1.2e9, 1.204e9, 1.208e9], 4e6), ["1.200e+9", "1.204e+9", "1.208e+9"]);
  assert.deepEqual(ticks([0, 2.5, 5], 2.5), ["0.0", "2.5", "5.0"]);
  assert.deepEqual(ticks([0, 2e-5, 4e-5], 2e-5), ["0", "2e-5", "4e-5"]);
  assert.deepEqual(ticks([0, 1000, null], 1000), ["0", "1,000", ""]);
  assert.deepEqual(ticks([0.9, 0.925, 0.95], 0.025, true), ["90.0%", "92.5%", "95.0%"]);
});

test("a metric that is a share is shown in percent", () => {
  setGlossary([{ id: "effective", unit: "%" }, { id: "loss", unit: "nat" }]);
  assert.deepEqual([inUnit("effective", 0.9312), inUnit("loss", 0.9312), inUnit("other", 0.25)], ["93.1%", "0.9312", "0.25"]);
});

test("the browser's language", () => {
  assert.equal(preferred(["zh-TW", "en"]), "zh");
  assert.equal(preferred(["fr-FR", "en-US"]), "en");
  assert.equal(preferred(["fr"]), "en");
});
