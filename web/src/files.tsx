// Files: an index of the recordings, one line each. They are read one after the other, from the first.

import { useEffect, useState } from "preact/hooks";
import type { Summary } from "./answers";
import { plural, share, size, time } from "./format";
import { Meter } from "./parts";
import { message, openFile, source, update, useStore } from "./state";

type Known = Summary | { error: string };

/** Kept while the page is open, so that switching views does not read files again. */
const known = new Map<number, Known>();

export function Files() {
  const { start, other, file } = useStore();
  const [, again] = useState(0);
  const files = start?.files ?? [];
  useEffect(() => {
    const asking = new AbortController();
    const read = async (): Promise<void> => {
      for (const each of files) {
        if (known.has(each.file)) continue;
        const found = await source.ask<Summary>("summary", { file: each.file }, asking.signal)
          .catch((error: unknown) => ({ error: message(error) }));
        if (asking.signal.aborted) return;
        known.set(each.file, found);
        again((count) => count + 1);
      }
    };
    void read();
    return () => asking.abort();
  }, [files.length]);
  const most = Math.max(1, ...[...known.values()].map((each) => ("most" in each ? (each.most["reserved"] ?? 0) : 0)));
  return (
    <section class="view files" aria-label="Files">
      <article tabIndex={0}>
        <h1>{start?.folder ? `Recordings in ${start.folder}` : "Recordings"}</h1>
        <table class="wide">
          <thead><tr><th>file</th><th>result</th><th>peak allocated</th><th class="number">most reserved</th><th class="number">fragmented</th>
            <th class="number">events</th><th class="number">duration</th><th><span class="hidden">compare</span></th></tr></thead>
          <tbody>
            {files.map((each) => <Row key={each.file} name={each.name} bytes={each.bytes} file={each.file} found={known.get(each.file)} most={most}
              compare={files.length > 1 && each.file !== file ? () => update({ view: "compare", other: each.file }) : null} compared={each.file === other} />)}
          </tbody>
        </table>
        <p class="dim">Click a name to open the recording. Drop a file onto the page to add it.</p>
      </article>
    </section>
  );
}

function Row(props: {
  name: string; bytes: number; file: number; found: Known | undefined; most: number; compare: (() => void) | null; compared: boolean;
}) {
  const { name, bytes, file, found, most, compare } = props;
  return (
    <tr>
      <td><button type="button" class="link" onClick={() => void openFile(file)}>{name}</button> <span class="dim">{size(bytes)}</span></td>
      {found === undefined && <td class="dim" colSpan={6}>reading …</td>}
      {found && "error" in found && <td class="warn" colSpan={6}>{found.error}</td>}
      {found && "most" in found && (
        <>
          <td>{found.failed === null ? <span class="badge quiet">completed</span> : <span class="badge alarm">out of memory</span>}
            {" "}<span class="dim">{found.failed === null ? found.verdict : `${size(found.failed)}, ${found.verdict}`}</span></td>
          <td><Meter share={(found.most["allocated"] ?? 0) / most}>{size(found.most["allocated"] ?? 0)}</Meter></td>
          <td class="number">{size(found.most["reserved"] ?? 0)}</td><td class="number">{share(found.fragmentation, 1)}</td>
          <td class="number">{plural(found.events, "event")}</td><td class="number">{found.timed ? time(found.span_us) : "–"}</td>
        </>
      )}
      <td>{compare && <button type="button" class="small" onClick={compare} aria-label={`Compare with ${name}`}>Compare</button>}</td>
    </tr>
  );
}
