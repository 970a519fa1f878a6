// An address restores the view that it was made of.
import assert from "node:assert/strict";
import test from "node:test";
import { address, parse } from "../../../src/stoker/page/static/router.js";
import { rangeOf, zoomOf } from "../../../src/stoker/page/static/run.js";

test("there and back", () => {
  for (const view of [
    { place: "start", run: "", tab: "", query: {} },
    { place: "train", run: "a b/c", tab: "curves", query: { zoom: "10~200", smooth: "0.6", lang: "zh" } },
    { place: "compare", run: "x,y", tab: "", query: { axis: "tokens" } },
    { place: "data", run: "", tab: "rows", query: {} },
  ]) assert.deepEqual(parse(address(view)), view);
});

test("what is not an address is the start", () => {
  for (const hash of ["", "#", "#/", "#/nowhere/x", "#/%E0%A4%A"]) assert.equal(parse(hash).place, "start");
});

test("a zoom is part of it", () => {
  assert.deepEqual(rangeOf(zoomOf([1, 200.5])), [1, 200.5]);
  assert.deepEqual(rangeOf(zoomOf([-3, 2e9])), [-3, 2e9]);
  assert.equal(rangeOf("nonsense"), null);
  assert.equal(zoomOf(null), null);
});
