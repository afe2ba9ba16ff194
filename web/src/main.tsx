import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import { App } from "./app";
import { setTheme } from "./colors";
import { begin } from "./state";
import "./style.css"; // last, to override the styles of libraries

setTheme("");

render(<App />, document.getElementById("page")!);
void begin();
