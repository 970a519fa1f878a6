// The name of a folder that a text becomes, as the server makes it; empty where the text has no letter or digit.
const LONGEST = 80; // characters

export const folderName = (text) => [...text.replace(/(?:[^\p{L}\p{N}_.-]|\.{2,})+/gu, "-").replace(/^[-.]+/, "")].slice(0, LONGEST).join("").replace(/[-.]+$/, "");
