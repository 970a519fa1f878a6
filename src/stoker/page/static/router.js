// Addresses: `#/PLACE/RUN/TAB?name=value` restores a view; the language is part of it.
import { useEffect, useState } from "./html.js";

export const PLACES = ["start", "data", "plan", "train", "compare", "use"];

/** The parts of an address; an unknown place is `start`. */
export function parse(hash) {
  const [path, query = ""] = String(hash || "").replace(/^#?\/?/, "").split("?");
  const [place = "", run = "", tab = ""] = path.split("/").map(decode);
  const known = PLACES.includes(place);
  return { place: known ? place : "start", run: known ? run : "", tab: known ? tab : "", query: queryOf(query) };
}

/** The address of parts: what `parse` reads back. */
export function address({ place = "start", run = "", tab = "", query = {} }) {
  const path = [place, run, tab].map(encodeURIComponent);
  while (path.length > 1 && !path[path.length - 1]) path.pop();
  const values = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const tail = new URLSearchParams(values.map(([name, value]) => [name, String(value)])).toString();
  return `#/${path.join("/")}${tail ? `?${tail}` : ""}`;
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const queryOf = (text) => Object.fromEntries(new URLSearchParams(text));

/** Where the page is. */
export const here = () => parse(location.hash);

const OF_ONE_RUN = "zoom step rank from at line".split(" "); // queries that mean nothing for another run, or another job

/** An address that differs from this one; the language stays, other queries stay only within a place. */
export function link(change) {
  const now = here();
  const stays = change.place === undefined || change.place === now.place;
  const kept = stays ? { ...now.query } : { lang: now.query.lang };
  const isOther = change.run !== undefined && change.run !== now.run;
  if (isOther && now.place !== "compare") for (const name of OF_ONE_RUN) delete kept[name]; // runs that are compared share their axis
  const base = stays ? now : { place: change.place, run: "", tab: "" };
  return address({ ...base, ...change, query: { ...kept, ...change.query } });
}

/** Goes there; `replace` leaves no entry in the history, for zoom and smoothing. */
export function go(change, { replace = false } = {}) {
  const target = link(change);
  if (replace) {
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = target;
}

/** The current address, in a component that is drawn again when it changes. */
export function useRoute() {
  const [route, set] = useState(here);
  useEffect(() => {
    const moved = () => set(here());
    addEventListener("hashchange", moved);
    moved(); // the address may have changed before this listened
    return () => removeEventListener("hashchange", moved);
  }, []);
  return route;
}
