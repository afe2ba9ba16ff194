// Trees of holders: without the frames of the framework, from the innermost call outwards, and what a search finds.

import type { Holder } from "./answers";

// PyTorch, code that torch.compile generates, and native code.
const FRAMEWORK = /^(torch|functorch|triton)[/\\]|[/\\]torchinductor|\.(c|cc|cpp|cu|h|hpp|so)(\.\d+)*:\d+ |^\?\?/;

/** The tree without the framework's frames: their callers hold what they held. */
export function withoutFramework(tree: Holder): Holder {
  const stacks = new Set(tree.stacks);
  const children = new Map<string, Holder>();
  const take = (each: Holder): void => {
    if (!FRAMEWORK.test(each.name)) return add(children, withoutFramework(each));
    for (const stack of each.stacks) stacks.add(stack);
    for (const below of each.children) take(below);
  };
  for (const each of tree.children) take(each);
  return { ...tree, stacks: [...stacks], children: [...children.values()] };
}

/** The tree from the innermost call outwards; the first `kept` levels stay outside. */
export function inverted(tree: Holder, kept: number): Holder {
  if (kept > 0) return { ...tree, children: tree.children.map((each) => inverted(each, kept - 1)) };
  const children = new Map<string, Holder>();
  const follow = (each: Holder, callers: string[]): void => {
    const path = [each.name, ...callers];
    const own = remainder(each);
    if (own.bytes || own.before) insert(children, path, own);
    for (const below of each.children) follow(below, path);
  };
  for (const each of tree.children) follow(each, []);
  return { ...tree, children: [...children.values()] };
}

/** Bytes of the outermost nodes whose name contains `term`. */
export function matched(tree: Holder, term: string): number {
  const wanted = term.toLowerCase();
  const look = (each: Holder): number =>
    each.name.toLowerCase().includes(wanted) ? each.bytes : each.children.reduce((sum, below) => sum + look(below), 0);
  return tree.children.reduce((sum, each) => sum + look(each), 0);
}

type Amount = Pick<Holder, "bytes" | "before" | "blocks" | "stacks">;

/** What a node holds besides its children. */
function remainder(node: Holder): Amount {
  const left = (of: (each: Holder) => number): number => of(node) - node.children.reduce((sum, each) => sum + of(each), 0);
  return { bytes: left((each) => each.bytes), before: left((each) => each.before), blocks: left((each) => each.blocks), stacks: node.stacks };
}

function insert(level: Map<string, Holder>, path: string[], amount: Amount): void {
  const [name = "", ...rest] = path;
  const node: Holder = { name, ...amount, stacks: rest.length ? [] : amount.stacks, children: [] };
  const inner = new Map<string, Holder>();
  if (rest.length) insert(inner, rest, amount);
  add(level, { ...node, children: [...inner.values()] });
}

/** Add a node to a level, joined with one of the same name. */
function add(level: Map<string, Holder>, node: Holder): void {
  const there = level.get(node.name);
  if (!there) {
    level.set(node.name, node);
    return;
  }
  const children = new Map(there.children.map((each) => [each.name, each]));
  for (const each of node.children) add(children, each);
  level.set(node.name, {
    name: node.name, bytes: there.bytes + node.bytes, before: there.before + node.before, blocks: there.blocks + node.blocks,
    stacks: [...new Set([...there.stacks, ...node.stacks])], children: [...children.values()],
  });
}
