// What outlives a reload of the page: the job being written, the last run looked at, theme. Kept in this browser only.
import { useEffect, useState } from "./html.js";

const KEY = "stoker.page";
const listeners = new Set();
const store = typeof localStorage === "undefined" ? { getItem: () => null, setItem: () => {}, removeItem: () => {} } : localStorage;

const EMPTY = { previous: null, yaml: "", name: "", file: "", audited: false, planned: false, run: "", theme: "auto" };
let place = KEY; // where the state of this user is kept
let state = { ...EMPTY, ...read() };

function read() {
  try {
    return JSON.parse(store.getItem(place)) ?? {};
  } catch {
    return {};
  }
}

/** The state as it is now. */
export const session = () => state;

const take = (next) => {
  state = next;
  for (const listener of listeners) listener(state);
};

function takeKept() {
  take({ ...EMPTY, ...read() });
  applyTheme(state.theme);
}

/** Takes over what a user who has signed in has kept: users of one browser do not share a draft. */
export function keepFor(user) {
  place = `${KEY}/${user}`;
  takeKept();
}

/** Forgets everything but the theme, at sign-out. */
export function forget() {
  store.removeItem(place);
  take({ ...EMPTY, theme: state.theme });
  remember({ theme: state.theme });
}

/** Changes parts of it, keeps them beside what other tabs have kept, and tells every component that uses it. */
export function remember(change) {
  try {
    store.setItem(place, JSON.stringify({ ...read(), ...change }));
  } catch {
    // a full or forbidden store loses the draft at the next reload, nothing else
  }
  take({ ...state, ...change });
}

/** Takes over what another tab has kept: there is one job at hand for all tabs. */
export function onOtherTab({ key }) {
  if (key === place) takeKept();
}
globalThis.addEventListener?.("storage", onOtherTab);

/** The current state, in a component that is drawn again when it changes. */
export function useSession() {
  const [value, set] = useState(state);
  useEffect(() => {
    listeners.add(set);
    return () => listeners.delete(set);
  }, []);
  return value;
}

export const SETTLED = 1000; // ms without a change after which a job is asked about that another tab may be typing

/** Light, dark or as the system says. */
export function applyTheme(theme) {
  if (typeof document === "undefined") return;
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

/** A job was changed: what was found out about it no longer holds. */
export const rememberJob = (change) => remember({ ...change, audited: false, planned: false });

/** Another job becomes the one at hand; the former one can be brought back. */
export const replaceJob = ({ yaml, name }) =>
  rememberJob({ yaml, name, ...(state.yaml && state.yaml !== yaml ? { previous: { yaml: state.yaml, name: state.name } } : {}) });
