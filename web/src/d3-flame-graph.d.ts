// The part of d3-flame-graph that is used here; the package has no types.
declare module "d3-flame-graph" {
  import type { Selection } from "d3-selection";

  export interface Box<T> {
    data: T & { highlight?: boolean; value: number };
    highlight?: boolean;
    parent: Box<T> | null;
    depth: number;
  }
  export interface FlameGraph<T> {
    (selection: Selection<HTMLElement, T, null, undefined>): void;
    width(pixels: number): this;
    cellHeight(pixels: number): this;
    minFrameSize(pixels: number): this;
    inverted(on: boolean): this;
    selfValue(on: boolean): this;
    transitionDuration(ms: number): this;
    sort(by: boolean | ((one: Box<T>, other: Box<T>) => number)): this;
    setLabelHandler(label: (box: Box<T>) => string): this;
    getName(name: (box: Box<T>) => string): this;
    setColorMapper(color: (box: Box<T>, given: string) => string): this;
    setSearchMatch(match: (box: Box<T>, term: string) => boolean): this;
    onClick(handler: (box: Box<T>) => void): this;
    onHover(handler: (box: Box<T>) => void): this;
    search(term: string): void;
    clear(): void;
    resetZoom(): void;
    destroy(): void;
  }
  export default function flamegraph<T>(): FlameGraph<T>;
}
declare module "*.css";
