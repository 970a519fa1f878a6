// Preact, its hooks and htm's tagged templates, bound once for every module of the page.
import { Fragment, h, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export * from "./vendor/hooks.mjs";
export { Fragment, h, render };
export const html = htm.bind(h);
