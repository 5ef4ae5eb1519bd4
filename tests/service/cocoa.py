"""A small desktop: the parts of AppKit, Foundation and objc that the menu's shell uses.

It fails as the real ones do, or sooner: for what is called off the main thread, a selector whose
name and arguments differ, a class that is made twice, a delegate that nobody holds. `Desktop.run`
is the run loop; between what it is asked to do on the main thread, a user acts: a generator.
"""

import functools
import inspect
import queue
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import nullcontext
from threading import current_thread, main_thread
from types import ModuleType
from typing import Any

SYMBOLS = {"bolt", "bolt.fill", "bolt.slash", "hourglass", "exclamationmark.triangle"}
WITHIN_S = 10.0
User = Generator[None, None, None]


class Misuse(BaseException):
    """Past every `except Exception`, since the real thing would be a crash."""


class Terminated(BaseException):
    """terminate: doesn't return."""


def on_main(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def checked(*arguments: Any, **named: Any) -> Any:
        if current_thread() is not main_thread():
            raise Misuse(f"{call.__qualname__} off the main thread")
        if named:
            raise Misuse(f"{call.__qualname__}: a selector has no named arguments")
        return call(*arguments)

    return checked


class Native:
    """A class of AppKit: its methods are of the main thread, and it takes no new attributes."""

    def __init_subclass__(cls) -> None:
        for name, member in list(vars(cls).items()):
            if name.startswith("_"):
                continue
            if isinstance(member, classmethod):
                setattr(cls, name, classmethod(on_main(member.__func__)))
            elif inspect.isfunction(member):
                setattr(cls, name, on_main(member))

    @classmethod
    def alloc(cls) -> Any:
        return cls()

    def init(self) -> Any:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise Misuse(f"{type(self).__name__} has no attribute {name} to set")
        super().__setattr__(name, value)


def typed(value: Any, *kinds: Any) -> Any:
    if not any(value is None if kind is None else type(value) is kind for kind in kinds):
        raise Misuse(f"{value!r} is none of {kinds}")
    return value


class NSImage(Native):
    def __init__(self, name: str) -> None:
        self._name, self._is_template = name, False

    @classmethod
    def imageWithSystemSymbolName_accessibilityDescription_(cls, name: str, said: str) -> Any:
        typed(said, str, None)
        return cls(name) if name in SYMBOLS else None

    def setTemplate_(self, is_template: bool) -> None:
        self._is_template = typed(is_template, bool)


class NSStatusBarButton(Native):
    def __init__(self) -> None:
        self._image: NSImage | None = None
        self._title, self._tip = "", ""

    def setImage_(self, image: NSImage | None) -> None:
        self._image = typed(image, NSImage, None)

    def setTitle_(self, title: str) -> None:
        self._title = typed(title, str)

    def setToolTip_(self, tip: str | None) -> None:
        self._tip = typed(tip, str, None)


class NSMenuItem(Native):
    def __init__(self) -> None:
        self._title, self._selector, self._tip = "", None, None
        self._is_enabled, self._state, self._level = True, 0, 0
        self._key: Any = None
        self._menu: Any = None
        self._target: Callable[[], Any] = lambda: None

    def initWithTitle_action_keyEquivalent_(self, title: str, action: Any, key: str) -> Any:
        self._title, self._selector = typed(title, str), typed(action, str, None)
        typed(key, str)
        return self

    @classmethod
    def separatorItem(cls) -> Any:
        item = cls()
        item._title = "---"
        return item

    def setTarget_(self, target: Any) -> None:
        self._target = weakref.ref(target)

    def setRepresentedObject_(self, key: Any) -> None:
        self._key = key

    def representedObject(self) -> Any:
        return self._key

    def setTitle_(self, title: str) -> None:
        self._title = typed(title, str)

    def setEnabled_(self, is_enabled: bool) -> None:
        self._is_enabled = typed(is_enabled, bool)

    def setState_(self, state: int) -> None:
        self._state = typed(state, int)

    def setIndentationLevel_(self, level: int) -> None:
        if not 0 <= typed(level, int) <= 15:
            raise Misuse(f"indentation {level}")
        self._level = level

    def setToolTip_(self, tip: str | None) -> None:
        self._tip = typed(tip, str, None)


class NSMenu(Native):
    def __init__(self) -> None:
        self._items: list[NSMenuItem] = []
        self._autoenables = True
        self._n_rebuilt = 0
        self._delegate: Callable[[], Any] = lambda: None

    def setAutoenablesItems_(self, is_so: bool) -> None:
        self._autoenables = typed(is_so, bool)

    def setDelegate_(self, delegate: Any) -> None:
        self._delegate = weakref.ref(delegate)

    def itemArray(self) -> list[NSMenuItem]:
        return list(self._items)

    def addItem_(self, item: NSMenuItem) -> None:
        if typed(item, NSMenuItem)._menu is not None:
            raise Misuse("an item is in a menu already")
        item._menu = self
        self._items.append(item)

    def removeAllItems(self) -> None:
        for item in self._items:
            item._menu = None
        self._items = []
        self._n_rebuilt += 1


class NSStatusItem(Native):
    def __init__(self) -> None:
        self._button = NSStatusBarButton()
        self._menu: NSMenu | None = None

    def button(self) -> NSStatusBarButton:
        return self._button

    def setMenu_(self, menu: NSMenu) -> None:
        self._menu = typed(menu, NSMenu)


class Desktop:
    """user: acts while the run loop is idle; each of its yields lets the loop go on."""

    def __init__(self) -> None:
        self.items: list[NSStatusItem] = []
        self.policy: int | None = None
        self.copied: str | None = None
        self.user: User | None = None
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    # --- what the shell imports

    def modules(self) -> dict[str, ModuleType]:
        objc = ModuleType("objc")
        vars(objc).update(python_method=python_method, autorelease_pool=nullcontext)
        foundation = ModuleType("Foundation")
        vars(foundation).update(NSObject=self._object())
        appkit = ModuleType("AppKit")
        vars(appkit).update(
            NSApplication=self._application(), NSStatusBar=self._status_bar(),
            NSPasteboard=self._pasteboard(), NSPasteboardTypeString="public.utf8-plain-text",
            NSApplicationActivationPolicyAccessory=1, NSVariableStatusItemLength=-1.0,
            NSImage=NSImage, NSMenu=NSMenu, NSMenuItem=NSMenuItem,
        )  # fmt: skip
        return {"objc": objc, "Foundation": foundation, "AppKit": appkit}

    def _object(self) -> type:
        desktop, made = self, set[str]()

        class NSObject:
            def __init_subclass__(cls) -> None:
                if cls.__name__ in made:
                    raise Misuse(f"{cls.__name__} is overriding existing Objective-C class")
                made.add(cls.__name__)
                for name, member in vars(cls).items():
                    check_selector(name, member)

            @classmethod
            def alloc(cls) -> Any:
                return cls()

            def init(self) -> Any:
                return self

            def performSelectorOnMainThread_withObject_waitUntilDone_(
                self, selector: str, thing: Any, waits: bool
            ) -> None:
                method = getattr(self, selector.replace(":", "_"))
                typed(waits, bool)
                desktop._asked.put(lambda: method(thing))

        return NSObject

    def _application(self) -> type:
        desktop = self

        class NSApplication(Native):
            _shared: Any = None

            @classmethod
            def sharedApplication(cls) -> Any:
                cls._shared = cls._shared or cls()
                return cls._shared

            def setActivationPolicy_(self, policy: int) -> None:
                desktop.policy = typed(policy, int)

            def run(self) -> None:
                desktop._run()

            def terminate_(self, sender: Any) -> None:
                raise Terminated

        return NSApplication

    def _status_bar(self) -> type:
        desktop = self

        class NSStatusBar(Native):
            @classmethod
            def systemStatusBar(cls) -> Any:
                return cls()

            def statusItemWithLength_(self, length: float) -> NSStatusItem:
                typed(length, float)
                desktop.items.append(NSStatusItem())
                return desktop.items[-1]

        return NSStatusBar

    def _pasteboard(self) -> type:
        desktop = self

        class NSPasteboard(Native):
            _is_clear = False

            @classmethod
            def generalPasteboard(cls) -> Any:
                return cls()

            def clearContents(self) -> int:
                self._is_clear = True
                return 1

            def setString_forType_(self, text: str, kind: str) -> bool:
                if not self._is_clear or kind != "public.utf8-plain-text":
                    raise Misuse("the pasteboard must be cleared, and know the type")
                desktop.copied = typed(text, str)
                return True

        return NSPasteboard

    # --- the run loop

    def _run(self) -> None:
        assert self.user is not None
        try:
            while True:
                try:
                    self._asked.get(timeout=0.005)()
                except queue.Empty:
                    next(self.user)
        except Terminated:
            return
        except StopIteration:
            raise Misuse("the user left without quitting") from None

    # --- what a user does

    @property
    def icon(self) -> NSStatusBarButton:
        return self.items[0]._button

    @property
    def menu(self) -> NSMenu:
        menu = self.items[0]._menu
        assert menu is not None
        return menu

    def titles(self) -> list[str]:
        return [item._title for item in self.menu._items]

    def row(self, begin: str) -> NSMenuItem:
        return next(item for item in self.menu._items if item._title.startswith(begin))

    def until(self, is_so: Callable[[], bool]) -> User:
        until_s = time.monotonic() + WITHIN_S
        while not is_so():
            assert time.monotonic() < until_s, self.titles()
            yield

    def until_shown(self, begin: str) -> User:
        return self.until(lambda: any(title.startswith(begin) for title in self.titles()))

    def open(self) -> None:
        delegate = self.menu._delegate()
        if delegate is None:
            raise Misuse("nobody holds the menu's delegate")
        delegate.menuNeedsUpdate_(self.menu)
        delegate.menuWillOpen_(self.menu)

    def close(self) -> None:
        self.menu._delegate().menuDidClose_(self.menu)

    def click(self, begin: str) -> None:
        """Open the menu and choose this line, which must be there and enabled."""
        self.open()
        item = self.row(begin)
        if not item._is_enabled or item._selector is None:
            raise Misuse(f"{item._title} can't be clicked")
        self.close()
        method = getattr(item._target(), item._selector.replace(":", "_"))
        method(item)


def python_method(method: Any) -> Any:
    method.is_python = True
    return method


def check_selector(name: str, member: Any) -> None:
    """objc.BadPrototypeError: as many arguments as underscores, unless it is Python's alone."""
    if not inspect.isfunction(member) or hasattr(member, "is_python") or name.startswith("__"):
        return
    n_arguments = len(inspect.signature(member).parameters) - 1
    if n_arguments != name.count("_"):
        raise Misuse(f"{name}: {n_arguments} arguments")
