// What the places compute: forms, pairs, differences of jobs, verdicts, streams, uploads, the rail.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { splitEvents } from "../../../src/stoker/page/static/api.js";
import { columns } from "../../../src/stoker/page/static/chain.js";
import { chatLine, copyLine, firstQuestion, lossesLine, moveLine, quoted, resumeLine, startLine, stopLine } from "../../../src/stoker/page/static/commands.js";
import { againstLine, besideEachOther, differences, newestOf, verdict } from "../../../src/stoker/page/static/compare.js";
import { isOf, namesOf, written } from "../../../src/stoker/page/static/data.js";
import { setGlossary } from "../../../src/stoker/page/static/glossary.js";
import { t, useTable } from "../../../src/stoker/page/static/i18n.js";
import { setKey } from "../../../src/stoker/page/static/job.js";
import { dataName, figureRows, lossRows, trainedFiles, rankingRows } from "../../../src/stoker/page/static/evaluated.js";
import { appended, detail, isAtEnd } from "../../../src/stoker/page/static/run_tabs.js";
import { rememberJob, replaceJob, session } from "../../../src/stoker/page/static/session.js";
import { basicOf, grouped, meant, shown, stageNames, valueAt } from "../../../src/stoker/page/static/job_form.js";
import { columnsOf, roleEdits } from "../../../src/stoker/page/static/name_columns.js";
import { folderName, nameFrom } from "../../../src/stoker/page/static/folder_name.js";
import { cell, rowOf } from "../../../src/stoker/page/static/lookup.js";
import { Answered, clusterOf, fits, measuredRows, planEdits, SIZES } from "../../../src/stoker/page/static/plan.js";
import { colourOfTime } from "../../../src/stoker/page/static/timeline.js";
import { canChange, changesIn, changeText } from "../../../src/stoker/page/static/resume.js";
import { standing, target } from "../../../src/stoker/page/static/rail.js";
import { dataKeys, editsFor, imported, together } from "../../../src/stoker/page/static/start.js";
import { answerTo, filling, joined, meanLoss, measuredWords, paired, shownWords, tokensOf } from "../../../src/stoker/page/static/rows.js";
import { bars, place, short, totals } from "../../../src/stoker/page/static/communication.js";
import { heat, measured, spanOf, visible } from "../../../src/stoker/page/static/tokens.js";
import { onPort } from "../../../src/stoker/page/static/deploy.js";
import { newestAction } from "../../../src/stoker/page/static/doing.js";
import { Problem, Table, whenShown } from "../../../src/stoker/page/static/ui.js";
import { matching, runName, runsAlone, wholeJobs, withModel } from "../../../src/stoker/page/static/run_list.js";
import { startJob } from "../../../src/stoker/page/static/start_job.js";
import { changeChat, chatOf, evaluationOptions, hasActions, hasAdapter, isTakenBack, messagesOf, outOfLimits, shownAnswer, sidesOf, talkOf } from "../../../src/stoker/page/static/use.js";

test("a run goes on with a change in each line", () => {
  const changes = changesIn(" steps=20 \n\ndata.path=a b.jsonl\n");
  assert.deepEqual(changes, ["steps=20", "data.path=a b.jsonl"]);
  assert.equal(resumeLine({ folder: "runs/a" }, changes), "stoker train runs/a/job.yaml steps=20 'data.path=a b.jsonl'");
  assert.equal(changeText({ key: "steps", before: "12", after: "20" }), "steps: 12 → 20");
  assert.ok(!changeText({ key: "epochs", before: null, after: "2" }).includes("null"));
  assert.deepEqual([{}, { stage_of: { id: "" } }, { stage_of: { id: "x" } }, { number: 3 }].map((run) => canChange(run, false)), [true, true, false, false]);
  assert.equal(canChange({}, true), false);
});

test("a prediction is shown before anything is measured", () => {
  const predicted = { peak: 2 ** 31, seconds: 2 };
  const texts = (measured) => measuredRows(predicted, measured).map(([, ...cells]) => cells);
  const [[memory], [time]] = texts(null);
  assert.ok(memory.startsWith("2") && time.startsWith("2"));
  assert.deepEqual(texts({ memory: 2 ** 30, seconds: 4 }).map((cells) => [cells.length, cells[0], cells[2]]), [[3, memory, "-50%"], [3, time, "100%"]]);
});

test("a chat is kept by its runs", () => {
  changeChat("a,b", "text", "a draft");
  changeChat("a,b", "turns", (turns) => [...turns, { text: "Hello?", answers: ["Yes."] }]);
  assert.deepEqual(chatOf("a,b"), { turns: [{ text: "Hello?", answers: ["Yes."] }], text: "a draft", system: "" });
  assert.deepEqual(chatOf("a"), { turns: [], text: "", system: "" });
});

test("files with one name are told apart by their times", () => {
  const [a, b, other] = namesOf([{ id: "1", name: "a.jsonl", time: 1e9 }, { id: "2", name: "a.jsonl", time: 1.1e9 }, { id: "3", name: "b.jsonl", time: 1e9 }]);
  assert.equal(other, "b.jsonl");
  assert.ok(a !== b && a.startsWith("a.jsonl · "));
});

test("a script of done actions is one with an action", () => {
  const empty = "#!/bin/sh\nset -e\ncd /work\n";
  assert.deepEqual([empty, `${empty}# 2026-01-01 10:00:00 UTC, local: train\nstoker train a.yaml\n`].map(hasActions), [false, true]);
});

test("parts of a step have colours of their own, and their times a unit", () => {
  const ofPpo = ["compute", "bubble", "pipeline sends", "data parallel", "optimizer", "critic", "rollouts"];
  for (const parts of [ofPpo, ["compute", "data parallel", "activation copies", "optimizer"]]) assert.equal(new Set(parts.map(colourOfTime).filter(Boolean)).size, parts.length);
  assert.deepEqual([0, 8.51e-7, 0.0085, 2].map(short), ["0\u00a0s", "0.851\u00a0µs", "8.5\u00a0ms", "2\u00a0s"]);
});

test("a field's text means what YAML would read", () => {
  for (const [text, value] of [["5e-4", 5e-4], ["8", 8], ["-1.5", -1.5], ["true", true], ["", null], ["lora", "lora"], ["[1, 2]", [1, 2]], ["{x", "{x"], ["1 000", "1 000"], ["9007199254740993", "9007199254740993"]]) assert.deepEqual(meant(text), value, text);
  for (const value of [5e-4, true, "lora", [1, 2]]) assert.deepEqual(meant(shown(value)), value);
  assert.equal(shown(null), "");
});

test("a form has the keys of its task only", () => {
  const keys = [{ path: "task", meaning: "" }, { path: "seed", meaning: "" }, { path: "dpo.beta", meaning: "" }, { path: "grpo.loss", meaning: "" }, { path: "train.warmup", meaning: "share of the steps" }];
  assert.deepEqual([...grouped(keys, "dpo", ["task"]).keys()], ["", "dpo", "train"]);
  assert.deepEqual([...grouped(keys, "dpo", ["task"], "share").keys()], ["train"]);
  assert.equal(valueAt({ "data[0].path": 3 }, "data.path"), 3);
});

test("a form begins with the keys of its task and with the length that the job has", () => {
  const of = ({ task, ...job }) => basicOf(task, Object.fromEntries(Object.entries(job).map(([key, value]) => [key, { value }])));
  assert.ok(of({}).includes("model.name") && of({}).includes("steps"));
  const ranking = of({ task: "ranking", epochs: 2, steps: null });
  assert.ok(ranking.includes("ranking.label") && ranking.includes("epochs") && !ranking.some((key) => /^(model|tune)|seq_len|^steps/.test(key)));
  assert.ok(of({ task: "sft", epochs: 3, steps: null }).includes("epochs") && of({ task: "sft", epochs: 3, steps: 9 }).includes("steps"));
});

test("a file becomes the data of the stages that can learn from it", () => {
  const stages = ["sft", "reward", "ppo"].map((task) => ({ name: task, task }));
  assert.deepEqual(dataKeys([], "instruction"), ["data"]);
  assert.deepEqual(dataKeys(stages, "instruction"), ["stages[0].data", "stages[2].data"]);
  assert.deepEqual(dataKeys(stages, ""), ["stages[0].data", "stages[2].data"]);
  assert.deepEqual(dataKeys(stages, "preference"), ["stages[1].data"]);
  const file = { path: "/f.csv", format: "" };
  assert.deepEqual(editsFor(file, [], "sft"), [{ key: "data", value: "/f.csv" }]);
  assert.deepEqual(editsFor(file, [], "ranking").at(-1), { key: "ranking.positive", value: null }); // clicks are 0 and 1
  assert.deepEqual(editsFor({ ...file, likely_time: "seen" }, [], "ranking").at(-1), { key: "ranking.time", value: "seen" });
});

test("the stages of a job are found in its text", () => {
  assert.deepEqual(stageNames("task: sft\nstages:\n  - name: one\n    data: x\n\n  - name: two\nsteps: 1\n"), ["one", "two"]);
  assert.deepEqual(stageNames("stages:\n  - {name: one, data: x}\n  - name: \"two\" # then\n"), ["one", "two"]);
  assert.deepEqual(stageNames("task: sft\ndata: {name: one}\n"), []);
});

test("columns that fit no format can be named", () => {
  const names = ["Frage", "l'Antwort", "id"];
  const of = (...needed) => columnsOf({ key: "data[0].path", message: "m", columns: { names, needed } });
  assert.deepEqual(of(["instruction", "Frage"], ["output", "l'Antwort"]), { key: "data[0].columns", names, wanted: [["instruction", "Frage"], ["output", "l'Antwort"]] });
  assert.deepEqual(of(["chosen", "Frage"], ["rejected", ""]).wanted, [["prompt", ""], ["chosen", "Frage"], ["rejected", ""]]);
  assert.equal(columnsOf({ key: "data[0].path", message: "m", columns: null }), null);
});

test("the columns that were chosen become keys of the job", () => {
  const pairs = { key: "data[0].columns", roles: { chosen: "chosen", prompt: "query" }, ignore: [] };
  assert.deepEqual(roleEdits(pairs, { chosen: "chosen", prompt: "asked" }), [["data[0].columns", { prompt: "asked" }]]);
  assert.deepEqual(roleEdits(pairs, { chosen: "chosen", prompt: "prompt" }), [["data[0].columns", null]]);
  const log = { key: "ranking", roles: { label: "", time: "ts", group: "user" }, ignore: ["index"] };
  assert.deepEqual(roleEdits(log, { label: "click", time: "ts", group: "user" }), [["ranking.label", "click"]]);
  assert.deepEqual(roleEdits(log, { ...log.roles, time: "seen" }, []), [["ranking.time", "seen"], ["ranking.ignore", null]]);
  assert.deepEqual(roleEdits(log, { ...log.roles, time: "" }), [["ranking.time", null], ["ranking.ignore", ["index", "ts"]]]);
});

test("lines of the job lead to its editor, lines of its data do not", () => {
  globalThis.location = { hash: "#/data//audit" };
  const placeIn = (file, line = 3) => Problem({ error: { message: "m", line, file }, isOfJob: true }).props.children.props.place;
  assert.ok(placeIn("job.yaml").props.href.endsWith("line=3"));
  assert.equal(placeIn("/data/rows.json"), t("ui.at_line_of", { file: "rows.json", line: 3 }));
  assert.deepEqual([placeIn("/data/rows.parquet", 0), placeIn("", 0), placeIn("command line", 0)], ["rows.parquet", "", ""]);
});

test("a folder has the name that the server makes of a text", () => {
  assert.deepEqual(["my first run", "<b>x</b>/../a", "客服-问答.v1", "../", "a".repeat(210), `${"a".repeat(199)} b`, "服".repeat(100)].map(folderName), ["my-first-run", "b-x-b-a", "客服-问答.v1", "", "a".repeat(200), "a".repeat(199), "服".repeat(66)]);
});

test("a register that is dropped after its file is imported with it", () => {
  const [config, other, register] = ["lf.yaml", "b.yaml", "dataset_info.json"].map((name) => ({ name }));
  assert.deepEqual(together([config], [register]), [config, register]);
  assert.deepEqual(together([config], [other]), [other]);
});

test("a row to be scored has what is written, lists as JSON", () => {
  assert.deepEqual([cell("9007199254740993"), cell("a3"), cell('["a", 1]'), cell(" "), cell("[a")], ["9007199254740993", "a3", ["a", 1], undefined, "[a"]);
  assert.deepEqual(rowOf({ user: "7", item: "", price: "2.5" }), { user: "7", price: "2.5" });
});

/** The texts of a component's answer, that of its parts included where they have no state. */
const textsOf = (node) => (Array.isArray(node) ? node.flatMap(textsOf) : node?.props ? Object.values(node.props).flatMap(textsOf) : typeof node === "string" ? [node] : []);

test("a plan is shown in the form of its job: of each stage, of a ranking model, or of one layout", () => {
  useTable("en", { "plan.nothing_fits": "No layout fits" });
  const memory = { memory_gib: 3, step_time_s: 0.5, description: "8 data" };
  const stages = [{ name: "first", task: "sft", resident: ["policy"], plan: memory, run: { steps_known: true, seconds: 60 } }];
  const shown = (answer) => {
    const { type, props } = Answered({ answer, yaml: "" });
    return [type.name, textsOf(type(props)).join(" ")];
  };
  const [name, text] = shown({ stages, total: { memory_gib: 3, seconds: 60 } });
  assert.ok(name === "StagePlans" && text.includes("first") && text.includes("8 data") && !text.includes("No layout fits"), text);
  const unfit = { stages: [...stages, { name: "second", task: "dpo", resident: [], plan: null, changes: [] }], total: { memory_gib: null, seconds: null } };
  assert.match(shown(unfit)[1], /second.*No layout fits/);
  const ranking = { task: "ranking", fits: true, processes: 2, on_host: 1, host_memory: 2, memory: { total: 1 }, tower: 1, checkpoint: 1, sent: { total: 1 }, tables: [{ name: "users", rows: 7, bytes: 9 }] };
  assert.equal(shown(ranking)[0], "RankingPlan");
  assert.match(shown(ranking)[1], /plan\.fits.*users/);
  assert.equal(Answered({ answer: { plan: null }, yaml: "" }).type.name, "Nothing");
  assert.equal(Answered({ answer: { plan: memory, run: {} }, yaml: "" }).type.name, "Answer");
  assert.deepEqual([{ stages }, unfit, ranking, { ...ranking, fits: false }, { plan: null }, { plan: memory }].map(fits), [true, false, true, false, false, true]);
});

test("a plan that is taken replaces the layout, and brings the change that it needs", () => {
  const edits = (plan) => new Map(planEdits(plan).map(({ key, value }) => [key, value]));
  const taken = edits({ job: { parallel: { data: 8 }, train: { batch: 16 } } });
  assert.deepEqual(["data", "tensor", "recompute", "sync"].map((key) => taken.get(`parallel.${key}`)), [8, null, null, undefined]);
  assert.equal(taken.get("train.batch"), 16);
  const job = { parallel: { data: 1 }, train: {} };
  assert.deepEqual(planEdits({ job, words: "tune=lora" })[0], { key: "tune", value: "lora" });
  assert.deepEqual(planEdits({ job, words: "train.seq_len=768" })[0], { key: "train.seq_len", value: 768 });
  for (const words of ["--on 2x8xH100", "nodes: 2 in ours.yaml", "", undefined]) assert.equal(planEdits({ job, words })[0].key, "parallel.data");
});

test("numbers of devices are parts of a node or whole nodes", () => {
  assert.deepEqual(SIZES, [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64]);
});

test("pairs stand beside each other", () => {
  const row = (verdict) => ({ verdict });
  assert.deepEqual(paired([row("chosen"), row("rejected"), row(""), row("rejected")]).map((group) => group.length), [2, 1, 1]);
});

const packed = {
  number: 3,
  capacity: 8,
  tokens: 5,
  rows: [
    { source: "/a/x.jsonl", row: 7, lost: 0, continues: true, tokens: [{ text: "a", loss: null }, { text: "b", loss: 0.5 }] },
    { source: "/a/y.jsonl", row: 2, lost: 12, continues: false, tokens: [{ text: "c", loss: null }, { text: "d", loss: 2 }, { text: "e", loss: 1 }] },
  ],
};

test("a packed sequence knows where documents begin, how they end and how much is filled", () => {
  const tokens = joined(packed);
  assert.equal(tokens.map((token) => token.text).join(""), "abcde");
  assert.deepEqual(tokens.map((token) => token.document && [token.document.number, token.document.row.row, token.document.tokens]), [[1, 7, 2], undefined, [2, 2, 3], undefined, undefined]);
  assert.deepEqual(tokens.map((token) => [token.lost ?? 0, token.continues ?? false]), [[0, false], [0, true], [0, false], [0, false], [12, false]]);
  assert.equal(joined(packed), tokens, "drawn again it is the same list");
  useTable("en", JSON.parse(readFileSync(new URL("../../../src/stoker/page/static/messages.en.json", import.meta.url))));
  assert.equal(filling(packed), "Sequence 3: 2 documents fill 5 of 8 tokens (62.5%)");
  assert.equal(filling({ ...packed, capacity: null }), "Sequence 3: 5 tokens");
  assert.equal(filling({ ...packed, rows: packed.rows.slice(0, 1) }), "Sequence 3: 1 document fills 5 of 8 tokens (62.5%)");
  assert.deepEqual([1, 2].map((n) => t("tokens.cut", { n })), ["1 token is cut off here", "2 tokens are cut off here"]);
  assert.equal(t("tokens.document", { at: 1, place: "x", n: 1 }), "Document 1: x, 1 token");
});

test("it is said which sequences are shown, one alone and none behind the last", () => {
  useTable("en", JSON.parse(readFileSync(new URL("../../../src/stoker/page/static/messages.en.json", import.meta.url))));
  assert.equal(shownWords(20, 20, 60), "Sequences 21 to 40 of 60.");
  assert.equal(shownWords(0, 1, 1), "Sequence 1 of 1.");
  assert.equal(shownWords(60, 1, null), "Sequence 61 of 61.");
  assert.equal(shownWords(100, 0, 60), "There are 60 sequences, and none from here on.");
  assert.equal(shownWords(100, 0, 1), "There is 1 sequence, and none from here on.");
});

test("a measured loss stands only under the question that it answers, and no trained token is said in words", () => {
  const [question, answer] = [{ path: "/a", begin: 0, packed: "", at: "last" }, { step: 8, loss: null, tokens: 0 }];
  assert.equal(answerTo({ ...question }, { question, answer }), answer);
  for (const change of [{ path: "/b" }, { begin: 20 }, { packed: "1" }, { at: "best" }]) assert.equal(answerTo({ ...question, ...change }, { question, answer }), null);
  assert.equal(answerTo(question, null), null);
  for (const name of ["en", "zh"]) {
    useTable(name, JSON.parse(readFileSync(new URL(`../../../src/stoker/page/static/messages.${name}.json`, import.meta.url))));
    assert.equal(measuredWords(answer), t("tokens.none_trained", { step: 8 }));
    for (const of of [answer, { step: 8, loss: 0.5, tokens: 1 }, { step: 8, loss: 0.5, tokens: 2 }]) assert.doesNotMatch(measuredWords(of), /[{}]/);
  }
  useTable("en", JSON.parse(readFileSync(new URL("../../../src/stoker/page/static/messages.en.json", import.meta.url))));
});

test("losses of tokens have a mean and a span, untrained tokens none", () => {
  assert.deepEqual(packed.rows.map(meanLoss), [0.5, 1.5]);
  assert.equal(meanLoss({ tokens: [{ text: "a" }] }), null);
  assert.deepEqual(spanOf(packed.rows, "loss"), [0, 2]);
  assert.deepEqual(spanOf([{ tokens: [{ kl: -3 }, { kl: 1 }] }], "kl"), [-3, 1]);
  setGlossary([{ id: "kl", unit: "nat/answer" }, { id: "value", unit: "1" }]);
  assert.deepEqual([measured(0.5, "kl"), measured(0.5, "value"), measured(0.5, "other")], ["0.5 nat", "0.5", "0.5"]);
  assert.deepEqual(tokensOf(packed.rows[0]).map((token) => token.token_loss), [null, 0.5]);
  assert.equal(lossesLine({ folder: "runs/a b" }, { limit: 5, begin: 10, packed: "1", at: "8" }), "stoker eval 'runs/a b' --by-token 5 --offset 10 --packed --at 8");
  assert.equal(lossesLine({ folder: "runs/a" }, { limit: 20, begin: 0, packed: "", at: "last" }), "stoker eval runs/a --by-token 20");
});

test("an edited row is the one of its number and its file", async () => {
  const file = { id: "u1", path: "/state/uploads/u1/rows.csv" };
  assert.deepEqual([file, undefined, "", { id: "u2", path: "/b" }].map((each) => isOf({ source: file.path, row: 2 }, each)), [true, false, false, false]);
  const rows = [{ row: 2, text: '{"a": "first"}' }, { row: 4, text: '{"a": 9007199254740993}' }, { row: 5, text: "", problem: "not valid JSON" }];
  globalThis.fetch = async (path) => {
    const query = new URL(path, "http://x").searchParams;
    const from = query.has("row") ? rows.findIndex((each) => each.row >= Number(query.get("row"))) : Number(query.get("offset"));
    return { ok: true, headers: new Map([["content-type", "application/json"]]), text: async () => JSON.stringify({ rows: from < 0 ? [] : rows.slice(from, from + 1) }) };
  };
  assert.equal(await written("u1", 4), '{"a": 9007199254740993}');
  assert.equal(await written("u1", 2), '{"a": "first"}');
  for (const row of [3, 9]) await assert.rejects(written("u1", row), /no_row|no row/);
  await assert.rejects(written("u1", 5), /not valid JSON/);
});

test("the start of a job leads to its run only from where it was pressed", async () => {
  for (const [left, at] of [["#/start/job", "#/train/r1"], ["#/data", "#/data"]]) {
    globalThis.location = { hash: "#/start/job" };
    globalThis.fetch = async () => {
      location.hash = left;
      return { ok: true, headers: new Map([["content-type", "application/json"]]), text: async () => '{"id": "r1"}' };
    };
    await startJob(Promise.resolve({ yaml: "task: sft", name: "one" }));
    assert.equal(location.hash, at);
  }
});

test("files that are dropped together are imported together", async () => {
  const asked = [];
  globalThis.fetch = async (path, { body }) => {
    asked.push([path, JSON.parse(body)]);
    return { ok: true, headers: new Map([["content-type", "application/json"]]), text: async () => '{"yaml": "task: sft"}' };
  };
  const files = [{ name: "a.yaml", text: async () => "deepspeed: b.json" }, { name: "b.json", text: async () => "{}" }];
  assert.deepEqual(await imported(files), { yaml: "task: sft", name: "a.yaml" });
  assert.deepEqual(asked, [["/api/import", { files: [{ name: "a.yaml", text: "deepspeed: b.json" }, { name: "b.json", text: "{}" }] }]]);
});

test("differences of jobs", () => {
  const a = { task: "sft", "train.batch": "8", "data.0.path": "a.jsonl", "data.1.path": "b.jsonl", steps: "3" };
  const { steps, ...b } = { ...a, "train.batch": "16", "data.0.path": "c.jsonl" };
  assert.deepEqual(differences([a, b]), [["train.batch", "8", "16"], ["data.0.path", "a.jsonl", "c.jsonl"], ["steps", "3", "–"]]);
  assert.deepEqual(differences([a, a]), []);
});

test("a verdict is clear, or says that it cannot tell", () => {
  assert.deepEqual(verdict({ low: 2.1, high: 4.8, significant: true }), { key: "compare.better", least: 2.1, most: 4.8 });
  assert.deepEqual(verdict({ low: -0.4, high: -0.1, significant: true }, false), { key: "compare.better", least: 0.1, most: 0.4 });
  assert.deepEqual(verdict({ low: 0.1, high: 0.4, significant: true }, false), { key: "compare.worse", least: 0.1, most: 0.4 });
  assert.deepEqual(verdict({ low: -1, high: 1, rows: 200, significant: false }), { key: "compare.cannot_tell", rows: 200 });
  assert.deepEqual(verdict({ low: 0.2, high: 0.6, rows: 5, significant: false }), { key: "compare.cannot_tell", rows: 5 });
});

test("of two comparisons of a pair on the same data the newer one counts", () => {
  const one = { run: "b", against: "a", metric: "exact", data: "x.jsonl", step: 5 };
  assert.deepEqual(newestOf([one, { ...one, data: "y.jsonl" }, { ...one, step: 9 }]).map(({ step, data }) => [step, data]), [[9, "x.jsonl"], [5, "y.jsonl"]]);
});

test("figures of a comparison are of their own run, and its command line names its rows", () => {
  useTable("en", JSON.parse(readFileSync(new URL("../../../src/stoker/page/static/messages.en.json", import.meta.url))));
  const runs = [{ id: "1", name: "a", folder: "runs/a" }, { id: "2", name: "b", folder: "runs/b" }];
  const exact = { kind: "against", of: "", metric: "exact", run: "b", data: "x.jsonl", time: 3, higher: true };
  const [own, other, less] = [{ subject: "b", value: 0.1 }, { subject: "a", value: 0.5 }, { subject: "b", against: "a", value: -0.4 }].map((one) => ({ ...exact, ...one }));
  const earlier = { ...exact, kind: "answers", run: "a", subject: "a", time: 1, value: 0.2 };
  const found = besideEachOther(runs, [[earlier, { ...earlier, data: "y.jsonl" }], [own, other, less]]);
  assert.deepEqual(found.map((row) => row.map((one) => one?.value)), [[0.5, 0.1], [0.2, undefined]]);
  assert.equal(againstLine(runs, less), "stoker eval runs/b --answers x.jsonl --against runs/a");
  const stages = ["first", "second"].map((chain) => ({ id: chain, name: "sft", folder: `runs/${chain}/sft` }));
  assert.equal(againstLine(stages, { ...less, run: "second/sft", against: "first/sft" }), "stoker eval runs/second/sft --answers x.jsonl --against runs/first/sft");
  assert.equal(againstLine(runs, { ...less, higher: false, data: "held out" }), againstLine(runs));
  const raw = ["b", "a", "less a"].map((of) => ({ of, name: "exact", value: 1 }));
  assert.deepEqual(figureRows({ kind: "against", model: "b", figures: raw }).map(([name]) => name), ["b: Exact match (exact)", "a: Exact match (exact)", "Exact match (exact), b minus a"]);
});

test("an evaluation has no options that exclude each other", () => {
  const all = { task: "sft", compare: true, answers: "a", prompts: "p", against: "b" };
  assert.deepEqual(evaluationOptions({ ...all, against: "" }), { answers: "a", prompts: "p" });
  assert.deepEqual(evaluationOptions(all), { answers: "a", against: "b" });
  const none = { answers: "", prompts: "p", against: "" };
  assert.deepEqual(["sft", "ranking", "module"].map((task) => evaluationOptions({ ...all, ...none, task })), [{ compare: true }, {}, {}]);
  assert.deepEqual(["sft", "ranking", "reward", "module", undefined].map(talkOf), [["chat"], ["lookup"], [], [], ["chat"]]);
});

test("rows of a table are those of their subjects, and the newest action of a run is found", () => {
  const rows = (node) => (Array.isArray(node) ? node.flatMap(rows) : node?.props ? [...(node.type === "tr" ? [node.key] : []), ...rows(node.props.children)] : []);
  assert.deepEqual(rows(Table({ name: "n", head: ["h"], rows: [["x"], ["y"]], keys: ["a", "b"] })).slice(1), ["a", "b"]);
  const actions = [{ id: "3", verb: "eval", run: "b" }, { id: "2", verb: "eval", run: "a" }, { id: "1", verb: "eval", run: "a" }];
  assert.deepEqual([newestAction(actions, "eval", "a"), newestAction(actions, "export", "a")], ["2", ""]);
});

test("each side is sent only what it has answered, so that users and models alternate", () => {
  const turns = [{ text: "1", answers: ["a"] }, { text: "2", answers: [""] }, { text: "3", answers: ["c", "d"] }];
  const contents = (at) => messagesOf(turns, at, "4").map(({ role, content }) => [role[0], content].join(""));
  assert.deepEqual(contents(0), ["u1", "aa", "u3", "ac", "u4"]);
  assert.deepEqual(contents(1), ["u3", "ad", "u4"]);
});

test("a log keeps its end, and follows it only from there", () => {
  assert.equal(appended("a", "b"), "ab");
  const long = appended("x".repeat(1 << 20), "end");
  assert.ok(long.length === 1 << 20 && long.endsWith("end"));
  assert.deepEqual([0, 95, 100].map((scrollTop) => isAtEnd({ scrollTop, clientHeight: 100, scrollHeight: 200 })), [false, true, true]);
});

test("the rail leads from a run to the list of all", () => {
  const state = { run: "r" };
  assert.deepEqual(["start", "train", "compare", "use"].map((place) => target(place, state, { place: "use", run: "r" }).run), ["", "r", "", "r"]);
  assert.equal(target("train", state, { place: "train", run: "r" }).run, "");
  assert.equal(target("train", state, { place: "train", run: "" }).run, "r");
});

test("a key is set in the text that is there when the server answers, and in no other job", async () => {
  let meanwhile = () => {};
  globalThis.fetch = async (_, { body }) => {
    const { yaml } = JSON.parse(body);
    meanwhile();
    meanwhile = () => {};
    return { ok: true, headers: new Map([["content-type", "application/json"]]), text: async () => JSON.stringify({ yaml: `${yaml}+key` }) };
  };
  rememberJob({ yaml: "old" });
  meanwhile = () => rememberJob({ yaml: "typed" });
  await setKey("steps", 3);
  assert.equal(session().yaml, "typed+key");
  meanwhile = () => replaceJob({ yaml: "recipe", name: "other" });
  await setKey("steps", 3);
  assert.equal(session().yaml, "recipe");
});

test("a stage stands right of all that it needs", () => {
  const stage = (name, ...needs) => ({ name, needs });
  const names = (stages) => columns(stages).map((column) => column.map((one) => one.name));
  assert.deepEqual(names([stage("sft"), stage("reward", "sft"), stage("ppo", "sft", "reward")]), [["sft"], ["reward"], ["ppo"]]);
  assert.deepEqual(names([stage("a"), stage("b"), stage("c", "a", "b"), stage("d", "elsewhere")]), [["a", "b", "d"], ["c"]]);
});

test("a pass lies in its lane by its time", () => assert.deepEqual(place(0.5, 1, 2), { left: "25%", width: "25%" }));

test("what is said at one time stands on another, as high as the share it takes", () => {
  const said = (kind, start, end, seconds, exposed = 0) => ({ kind, start, end, seconds, exposed });
  const messages = [said("tensor", 0, 4, 1, 1), said("all-gather", 0, 4, 2), said("send", 4, 5, 1, 1), said("tensor", 4, 6, 1, 1)];
  assert.deepEqual(bars(messages).map(({ bottom, height }) => [bottom, height]), [[0, 25], [25, 50], [0, 100], [0, 50]]);
  assert.deepEqual(bars([said("a", 0, 1, 2), said("b", 0, 1, 2), said("c", 3, 3, 0)]).map(({ bottom, height }) => [bottom, height]), [[0, 50], [50, 50], [0, 0]]);
  assert.deepEqual(totals(messages), [{ kind: "tensor", seconds: 2, exposed: 2 }, { kind: "all-gather", seconds: 2, exposed: 0 }, { kind: "send", seconds: 1, exposed: 1 }]);
});

test("a stream in pieces", () => {
  const [events, left] = splitEvents('data: {"text": "a"}\n\n: ping\n\nid: 3\r\ndata: {"text":\r\ndata: "b"}\r\n\r\ndata: {"te');
  assert.deepEqual(events, [{ text: "a" }, { text: "b" }]);
  assert.equal(left, 'data: {"te');
  assert.deepEqual(splitEvents("data: [DONE]\n\n"), [[], ""]);
});

test("command lines are quoted for a shell", () => {
  assert.equal(quoted("runs/a"), "runs/a");
  assert.equal(quoted("it's"), "'it'\\''s'");
  assert.equal(stopLine({ folder: "runs/a b" }), "stoker stop 'runs/a b'");
  assert.equal(copyLine({ folder: "runs/a b" }), "cp -r 'runs/a b' 'runs/a b-fork'");
  assert.equal(moveLine({ folder: "runs/a b" }), "mv 'runs/a b' 'runs/a b.1'");
  assert.equal(startLine("x"), "stoker train x.yaml output=runs/x");
});

test("tokens", () => {
  assert.equal(visible("\n"), "⏎\n");
  assert.equal(visible(" "), "·");
  assert.equal(visible(""), "∅");
  assert.equal(visible(" a"), " a");
  assert.deepEqual(heat(0, 0), {});
  assert.match(heat(-1, 1).background, /--series-0\) 45%/);
  assert.match(heat(5, 1).background, /--series-1\) 45%/);
});

test("a model is first asked what it can answer", () => {
  const messages = [{ role: "user", content: "…" }];
  assert.deepEqual([{ name: "m" }, { name: "m", scores: true }, { name: "m", columns: ["a", "b"] }].map(firstQuestion), [
    ["/v1/chat/completions", { model: "m", messages }],
    ["/v1/score", { model: "m", messages: [...messages, { role: "assistant", content: "…" }] }],
    ["/v1/score", { model: "m", rows: [{ a: null, b: null }] }],
  ]);
});

test("a job with stages is one row, and its stages have models of their own", () => {
  const [chain, stage, alone] = [{ id: "c", name: "chain", number: 1 }, { id: "s", name: "sft", stage_of: { id: "c", name: "chain" } }, { id: "a", name: "sft", stage_of: { id: "", name: "align" } }];
  assert.deepEqual([wholeJobs([chain, stage, alone]), runsAlone([chain, stage, alone])], [[chain, alone], [stage, alone]]);
  assert.deepEqual([chain, stage, alone].map(runName), ["chain", "chain/sft", "align/sft"]);
});

test("names, runs, clusters, sides and the rail", () => {
  assert.equal(nameFrom("My data (2).jsonl"), "my-data-2");
  assert.equal(nameFrom("数据.csv"), "数据");
  assert.equal(nameFrom("Rows_v1.2.jsonl.gz"), "rows_v1.2");
  assert.equal(nameFrom("..."), "job");
  assert.equal(matching([{ name: "a", task: "sft", model: "m", status: "done" }, { name: "b", task: "dpo", model: "m", status: "done" }], "done DPO").length, 1);
  assert.deepEqual([clusterOf(1, "local"), clusterOf(4, "H100"), clusterOf(32, "H100"), clusterOf(4, "data/ours.yaml")], ["local", "1x4xH100", "4x8xH100", "data/ours.yaml"]);
  assert.deepEqual(sidesOf(["a"], false), [{ id: "a", adapter: true }, { id: "a", adapter: false }]);
  assert.deepEqual([{ "tune.method": "lora" }, { tune: "qlora" }, { "tune.method": "full" }, { task: "sft" }, undefined].map(hasAdapter), [true, true, false, false, false]);
  assert.deepEqual(sidesOf(["a", "b", "c"], false).map((side) => side.id), ["a", "b"]);
  assert.deepEqual(standing("data", { yaml: "" }), { done: false });
  assert.deepEqual(standing("plan", { yaml: "" }), { blocked: "rail.no_job" });
  assert.deepEqual(standing("data", { yaml: "x", audited: true }), { done: true });
  assert.deepEqual([false, true].map((hasRuns) => standing("use", { run: "" }, hasRuns)), [{ blocked: "rail.no_run" }, { done: false }]);
});

test("a job that another tab types is asked about once it is still, in a tab that is shown", async () => {
  const still = () => new Promise((done) => setTimeout(done, 30));
  const tab = (globalThis.document = Object.assign(new EventTarget(), { hidden: false }));
  const asked = [];
  let cancel = () => {};
  for (const text of ["a", "ab", "abc"]) {
    cancel();
    cancel = whenShown(() => asked.push(text), 10);
  }
  await still();
  assert.deepEqual(asked, ["abc"]);
  cancel();
  tab.hidden = true;
  cancel = whenShown(() => asked.push("abcd"), 10);
  await still();
  assert.deepEqual(asked, ["abc"]);
  tab.hidden = false;
  tab.dispatchEvent(new Event("visibilitychange"));
  assert.deepEqual(asked, ["abc", "abcd"]);
  cancel();
  tab.dispatchEvent(new Event("visibilitychange"));
  assert.deepEqual(asked, ["abc", "abcd"]);
  delete globalThis.document;
});

test("a question comes back where a side failed, not where a model has nothing to say", () => {
  const [said, failed] = [{ status: "fulfilled" }, { status: "rejected" }];
  assert.deepEqual([isTakenBack(false, [said, said]), isTakenBack(false, [said, failed]), isTakenBack(true, [said, failed])], [false, true, false]);
});

test("files that were trained on are found in results of losses and of answers", () => {
  assert.deepEqual([{ trained_files: ["a"] }, { details: { trained_files: ["a"] } }, { details: {} }, {}].map(trainedFiles), [["a"], ["a"], [], []]);
});

test("an empty answer is said to be one, once it is whole", () => {
  const turn = { answers: ["", "Hi"] };
  assert.deepEqual([shownAnswer(turn, 1, true), shownAnswer(turn, 0, true), shownAnswer(turn, 0, false)], ["Hi", t("use.thinking"), ""]);
  assert.deepEqual([shownAnswer({ ...turn, isWhole: [true, true] }, 0, true).type, shownAnswer({ ...turn, isWhole: [false, true] }, 0, false)], ["em", ""]);
});

test("a server is started again on its port or another one", () => {
  assert.deepEqual(["", "0"].map((port) => onPort("stoker serve a --port 8000 --keys k", port)), ["stoker serve a --port 8000 --keys k", "stoker serve a --port 0 --keys k"]);
});

test("the rows of an evaluation have the name of their file, or are the held-out ones", () => {
  useTable("zh", { "use.eval_held_out": "HELD" });
  assert.deepEqual(["held out", null, "data/rows.jsonl"].map(dataName), ["HELD", "HELD", "rows.jsonl"]);
});

test("the command line of a chat has its settings, which have limits", () => {
  const settings = { temperature: "0.7", max: "64", system: "Be brief." };
  assert.equal(chatLine({ folder: "runs/a" }, true, settings), "stoker chat runs/a --temperature 0.7 --max-tokens 64 --system 'Be brief.'");
  assert.equal(chatLine({ folder: "runs/a" }, false, { temperature: "0", max: "8", system: "" }), "stoker chat runs/a --compare --max-tokens 8");
  const isOut = ([temperature, max_tokens]) => outOfLimits({ temperature, max_tokens }) !== "";
  assert.deepEqual([["2", "8192"], ["2.1", "8"], ["", "8"], ["0", "0"]].map(isOut), [false, true, true, true]);
});

test("an evaluation is a table, and details of events have their units", () => {
  useTable("en", JSON.parse(readFileSync(new URL("../../../src/stoker/page/static/messages.en.json", import.meta.url))));
  const side = { loss: 0.5, token_accuracy: 0.25, text_bytes: 2048 };
  assert.deepEqual(lossRows({ tuned: side, untuned: { ...side, loss: 2 }, step: 6 })[0], ["Held-out loss", "0.5 nat", "2 nat"]);
  assert.deepEqual(lossRows({ ...side, step: 6 }), [["Held-out loss", "0.5 nat"], ["Token accuracy", "25%"], ["Text", "2 KiB"]]);
  assert.deepEqual(figureRows({ kind: "prompts", figures: [{ of: "a", name: "rouge1", value: 0.5, low: 0.304, high: 0.696, rows: 20 }] }), [["a: rouge1", "0.5", "0.304 … 0.696", "20"]]);
  const auc = { auc: { value: 0.75, standard_error: 0.01, low: 0.73, high: 0.77 } };
  const alone = { auc: { value: 0.5, standard_error: null } };
  assert.deepEqual(rankingRows({ labels: { click: auc }, slices: { city: { Bonn: alone } } }), [["auc", "0.75", "0.73 … 0.77"], ["city = Bonn: auc", "0.5", "–"]]);
  assert.deepEqual(rankingRows({ labels: { click: auc, buy: alone }, slices_by_label: { buy: { city: { Bonn: alone } } } }).map(([name]) => name), ["click: auc", "buy: auc", "buy city = Bonn: auc"]);
  assert.deepEqual([detail("disk_free", 2048), detail("stall", 0.5), detail("where", "disk")], ["disk_free 2 KiB", "stall 0.5 s", "where disk"]);
  assert.ok(!detail("began", 1.7e9).includes("e+"));
});

test("a job with stages is used by the model of its newest stage", () => {
  const stage_of = { id: "job", name: "align" };
  const runs = [{ id: "c", step: 0, stage_of }, { id: "b", step: 4, stage_of }, { id: "a", step: 9, stage_of }, { id: "x", step: 5 }];
  assert.deepEqual(["job", "a", "x", "gone"].map((id) => withModel(id, runs)), ["b", "a", "x", "gone"]);
});
