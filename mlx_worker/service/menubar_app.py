"""Draws the menu in the menu bar, by PyObjC. Main thread only, as AppKit wants it.

Owns the status item and its menu. Leaves what they show to menubar.py, and everything that takes
time to menubar_watch.py, whose threads only ask for `changed:` on the main thread, with
performSelectorOnMainThread, since that is also heard while a menu is open.

Not seen on a Mac yet (docs/MAC.md): it is tested with a stand-in for AppKit. macOS 26 may hide the
icon, so nothing can be done here alone: the command line and the console do all of it too.
"""

import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mlx_worker.service.menubar import Action, Item, Menu
from mlx_worker.service.menubar_watch import Watch

FALLBACK = "MLX"  # where the system has no such symbol


def run(watching: Callable[[Callable[[], None]], Watch] = Watch) -> None:
    """Until Quit, which ends the process."""
    appkit: Any = import_module("AppKit")
    for number in (signal.SIGINT, signal.SIGTERM):  # Python's own would wait for the next event
        signal.signal(number, signal.SIG_DFL)
    app = appkit.NSApplication.sharedApplication()
    app.setActivationPolicy_(appkit.NSApplicationActivationPolicyAccessory)
    bar = menubar_class().alloc().init()  # held here: AppKit doesn't hold delegates
    bar.begin(watching)
    try:
        app.run()
    finally:
        bar.watch.stop()


def menubar_class() -> Any:
    """Made here, since PyObjC is there on a Mac alone. Once a process: Objective-C keeps classes.

    A method whose name ends in _ is called by AppKit, and has as many arguments as it has _.
    """
    objc: Any = import_module("objc")
    appkit: Any = import_module("AppKit")
    foundation: Any = import_module("Foundation")

    class MLXWorkerMenuBar(foundation.NSObject):
        @objc.python_method
        def begin(self, watching: Callable[[Callable[[], None]], Watch]) -> None:
            self.watch = watching(self.tell)
            self.item = new_status_item(appkit)
            self.rows = appkit.NSMenu.alloc().init()
            self.rows.setAutoenablesItems_(False)
            self.rows.setDelegate_(self)
            self.item.setMenu_(self.rows)
            self.draw()
            self.watch.start()

        @objc.python_method
        def tell(self) -> None:
            """Any thread."""
            with objc.autorelease_pool():
                self.performSelectorOnMainThread_withObject_waitUntilDone_("changed:", None, False)

        @objc.python_method
        def draw(self) -> None:
            self.drawn = self.watch.menu
            draw_icon(appkit, self.item.button(), self.drawn)
            draw_rows(appkit, self.rows, self.drawn, self)

        @objc.python_method
        def click(self, key: str) -> None:
            """As it was drawn: what came since isn't what was clicked."""
            action = self.drawn.action(key)
            if action is not None:
                act(appkit, self.watch, action)

        @objc.python_method
        def safely(self, do: Callable[[], None]) -> None:
            """An exception must not get into AppKit, which could end the process."""
            try:
                do()
            except Exception as error:
                self.watch.fail(error)

        def changed_(self, nothing: Any) -> None:
            self.safely(self.draw)

        def menuNeedsUpdate_(self, menu: Any) -> None:
            self.safely(self.draw)

        def menuWillOpen_(self, menu: Any) -> None:
            self.safely(lambda: self.watch.opened(True))

        def menuDidClose_(self, menu: Any) -> None:
            self.safely(lambda: self.watch.opened(False))

        def clicked_(self, sender: Any) -> None:
            self.safely(lambda: self.click(str(sender.representedObject())))

    return MLXWorkerMenuBar


def act(appkit: Any, watch: Watch, action: Action) -> None:
    """Copy and quit, which are of the main thread; the rest elsewhere."""
    if action.verb == "quit":
        appkit.NSApplication.sharedApplication().terminate_(None)
    elif action.verb == "copy":
        board = appkit.NSPasteboard.generalPasteboard()
        board.clearContents()
        board.setString_forType_(action.value, appkit.NSPasteboardTypeString)
    else:
        watch.click(action)


def new_status_item(appkit: Any) -> Any:
    bar = appkit.NSStatusBar.systemStatusBar()
    return bar.statusItemWithLength_(appkit.NSVariableStatusItemLength)


def draw_icon(appkit: Any, button: Any, menu: Menu) -> None:
    """A template image: macOS draws it light or dark, as the menu bar is."""
    image = appkit.NSImage.imageWithSystemSymbolName_accessibilityDescription_(
        menu.symbol, menu.title
    )
    if image is not None:
        image.setTemplate_(True)
    button.setImage_(image)
    button.setTitle_("" if image is not None else FALLBACK)
    button.setToolTip_(menu.title)


def draw_rows(appkit: Any, rows: Any, menu: Menu, target: Any) -> None:
    """In place where the same lines stay, so that an open menu keeps what is highlighted."""
    old = [row.representedObject() for row in rows.itemArray()]
    if old != [item and item.key for item in menu.items]:
        rows.removeAllItems()
        for item in menu.items:
            rows.addItem_(new_row(appkit, item, target))
    for row, item in zip(rows.itemArray(), menu.items, strict=True):
        if item is not None:
            fill(row, item)


def new_row(appkit: Any, item: Item | None, target: Any) -> Any:
    if item is None:
        return appkit.NSMenuItem.separatorItem()
    row = appkit.NSMenuItem.alloc().initWithTitle_action_keyEquivalent_(item.text, "clicked:", "")
    row.setTarget_(target)
    row.setRepresentedObject_(item.key)
    return row


def fill(row: Any, item: Item) -> None:
    row.setTitle_(item.text)
    row.setEnabled_(item.is_enabled)
    row.setState_(1 if item.is_checked else 0)  # NSControlStateValueOn, …Off
    row.setIndentationLevel_(item.level)
    row.setToolTip_(item.whole or None)
