// What the gateway tells as it happens: one stream of events while the page is seen.

const PATH = "/api/v1/events";
let source = null;

/** onOpen() at its begin, onChange({ workers, usage }) on each event, onEnd(wasOpen) when it broke off. */
export function listen(onOpen, onChange, onEnd) {
  stopListening();
  const mine = new EventSource(PATH);
  let wasOpen = false;
  source = mine;
  mine.addEventListener("open", () => {
    wasOpen = true;
    onOpen();
  });
  mine.addEventListener("changed", (event) => onChange(JSON.parse(event.data)));
  mine.addEventListener("error", () => {
    // Not left to the browser, which gives up for good after some kinds of failure.
    mine.close();
    if (source === mine) onEnd(wasOpen);
  });
}

export function stopListening() {
  source?.close();
  source = null;
}
