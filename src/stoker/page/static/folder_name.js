// The name of a folder that a text becomes, as the server makes it; empty where the text has no letter or digit.
const LONGEST = 200; // bytes

/** The beginning of a text, at most `most` bytes of UTF-8. */
const cut = (text, most) => text.slice(0, new TextEncoder().encodeInto(text, new Uint8Array(most)).read);

export const folderName = (text) => cut(text.replace(/(?:[^\p{L}\p{N}_.-]|\.{2,})+/gu, "-").replace(/^[-.]+/, ""), LONGEST).replace(/[-.]+$/, "");

/** The name of a run on a file: its folder's, in small letters and without the suffix. */
export const nameFrom = (file) => folderName(file.replace(/\.\w+(\.(gz|zst))?$/, "").toLowerCase()) || "job";
