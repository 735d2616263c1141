// The Markdown that models write, as elements: paragraphs, headings, lists, quotes, code, bold and italic text.
// `parse` makes a tree of it, and `render` elements whose text is all in text nodes, so nothing is taken for HTML.
// Links stay text: what a model names is not worth a click.

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+-]*)[^`]*$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;

// Blocks: {kind: "p" | "h", level, content} | {kind: "code", text} | {kind: "ul" | "ol", start, items} | {kind: "quote", blocks}
export function parse(text) {
  const lines = text.split("\n");
  const blocks = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) blocks.push({ kind: "p", content: inline(paragraph.join("\n")) });
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (fence) {
      flush();
      const code = [];
      for (i++; i < lines.length && !lines[i].trim().startsWith(fence[1]); i++) code.push(lines[i]);
      blocks.push({ kind: "code", text: code.join("\n") });
    } else if (heading) {
      flush();
      blocks.push({ kind: "h", level: heading[1].length, content: inline(heading[2]) });
    } else if (QUOTE.test(line)) {
      flush();
      const quoted = [];
      for (; i < lines.length && QUOTE.test(lines[i]); i++) quoted.push(QUOTE.exec(lines[i])[1]);
      i--;
      blocks.push({ kind: "quote", blocks: parse(quoted.join("\n")) });
    } else if (ITEM.test(line) && !paragraph.length) {
      const [, , bullet, number] = ITEM.exec(line);
      const items = [];
      for (; i < lines.length && lines[i].trim(); i++) {
        const item = ITEM.exec(lines[i]);
        if (item && Boolean(item[2]) === Boolean(bullet)) items.push(item[4]);
        else if (item || FENCE.test(lines[i])) break;
        else items[items.length - 1] += `\n${lines[i].trim()}`;
      }
      i--;
      blocks.push({ kind: bullet ? "ul" : "ol", start: Number(number ?? 1), items: items.map(inline) });
    } else if (line.trim()) {
      paragraph.push(line);
    } else {
      flush();
    }
  }
  flush();
  return blocks;
}

// Text as a list of strings and {kind: "code" | "strong" | "em", content}.
export function inline(text) {
  const parts = [];
  const mark = /(`+)([^`]+)\1(?!`)|\*\*(?=\S)([^*]+?)\*\*|__(?=\S)([^_]+?)__(?!\w)|\*(?=\S)([^*\n]+?)\*|\b_(?=\S)([^_\n]+?)_\b/g;
  let end = 0;
  for (const found of text.matchAll(mark)) {
    if (found.index > end) parts.push(text.slice(end, found.index));
    const [whole, , code, ...marked] = found;
    const [stars, lines, star, low] = marked;
    if (code !== undefined) parts.push({ kind: "code", content: [code] });
    else parts.push({ kind: (stars ?? lines) !== undefined ? "strong" : "em", content: [stars ?? lines ?? star ?? low] });
    end = found.index + whole.length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}

export function render(text, document) {
  const fragment = document.createDocumentFragment();
  for (const block of parse(text)) fragment.append(element(block, document));
  return fragment;
}

function element(block, document) {
  const make = (name, children) => {
    const made = document.createElement(name);
    made.append(...children);
    return made;
  };
  const words = (content) => content.map((part) => (typeof part === "string" ? part : make(part.kind, part.content)));
  if (block.kind === "code") return make("pre", [make("code", [block.text])]);
  if (block.kind === "h") return make(`h${Math.min(6, block.level + 2)}`, words(block.content));
  if (block.kind === "quote") return make("blockquote", block.blocks.map((one) => element(one, document)));
  if (block.kind === "p") return make("p", words(block.content));
  const list = make(block.kind, block.items.map((item) => make("li", words(item))));
  if (block.kind === "ol" && block.start !== 1) list.start = block.start;
  return list;
}
