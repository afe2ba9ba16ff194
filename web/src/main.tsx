import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import { App } from "./app";
import { setTheme } from "./colors";
import { begin } from "./state";
import "./style.css"; // last: it dresses what the libraries bring

setTheme("");

render(<App />, document.getElementById("page")!);
void begin();
