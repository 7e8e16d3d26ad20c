"""The gated feed-forward block as one program: y = down(activation(gate·x) · (up·x)), norm excluded; a residual
added to it where one is wanted, and each product's LoRA addend to that.

Where the model clamps the inputs of that product (`ModelDims.activation_limit`), it is of min(gate·x, limit) and of
up·x within the limit on both sides.

The gated product is computed in one of three places: the epilogue of gate and up, a launch of its own, or down's
input. All round gate·x, up·x and the product to BF16 and share one function, so that they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from atlas_lab.blocks.lora import Adapter, delta
from atlas_lab.blocks.projection import adding, finished
from atlas_lab.core.arm import Arm
from atlas_lab.core.call import Epilogue, Operand
from atlas_lab.core.context import Context
from atlas_lab.core.enqueued import Enqueued
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.library import after_libraries
from atlas_lab.core.program import PlanError, projection_call, settled
from atlas_lab.core.projection import Projection, label_of
from atlas_lab.core.route import Assignment, Route
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels.activation.gated import KINDS, kind_of
from atlas_lab.kernels.activation.product import THREADS, VECTOR, gated_product

FFN = "ffn"
GATE, UP, DOWN = "ffn.gate", "ffn.up", "ffn.down"


def ffn_program(
    gate_up: Route,
    down: Route,
    m: int,
    context: Context,
    arms: Mapping[str, Arm],
    *,
    residual: bool = False,
    adapters: Mapping[str, Adapter] | None = None,
) -> tuple[Program, tuple[str, ...]]:
    """The program of a block for `m` rows, and a sentence for each thing that the levers ask for and an arm cannot do.

    `gate_up` and `down` are the routes of its two sites, `arms` those that serve them, by name. Ports: x BF16
    `[m, hidden]` in, y BF16 `[m, hidden]` out, named `layers.0.ffn/x` and `/y`. Temporaries, all BF16: `/h` `[m, i]`,
    the gated product; before it, unless it is an epilogue, `/gu` `[m, 2i]` of an arm that serves both as a group, or
    `/g` and `/u` `[m, i]`; with the product in down's input there is no `/h`.

    The lever `gated` says where the product is computed; where an arm does not serve that, a launch of its own does
    it.

    With a `residual` a port `/residual` BF16 `[m, hidden]` is added to y. `adapters`, by role, add s·B(A·x) to a
    product: of gate and up before the activation, of down on the gated product, for which that must be stored. What an
    arm does not add in its epilogue, a launch after it does (`blocks.projection`). Without adapters, or with the lever
    `lora` off, there is no launch for them.

    Raises PlanError where the shapes, the activation or its limit are no gated block's, an adapter is of another role
    or shape, and as `program_of`; RouteError where nothing serves a role for `m` rows.
    """
    held = dict(adapters or {}) if context.levers.lora else {}
    return _Block(gate_up, down, m, context, arms, residual, held).program()


def served(gate_up: Route, down: Route, m: int) -> tuple[Assignment, ...]:
    """What serves gate and up, in one call or two, then down; raises RouteError where nothing does."""
    return (*dict.fromkeys((gate_up.at(GATE, m), gate_up.at(UP, m))), down.at(DOWN, m))


def stages(program: Program) -> tuple[Tensor, ...]:
    """What a block stores between its projections: its temporaries, without those of its arms."""
    (y,) = program.outputs
    label = y.name.rpartition("/")[0]
    return tuple(t for t in program.temporaries if t.name.rpartition("/")[0] == label)


def place_of(program: Program) -> str:
    """Where a block's program computes the gated product: `epilogue`, `launch` or `input`."""
    names = {t.name.rpartition("/")[2] for t in stages(program)}
    return "epilogue" if names == {"h"} else "input" if names == {"gu"} else "launch"


@dataclass
class _Block:
    gate_up: Route
    down: Route
    m: int
    context: Context
    arms: Mapping[str, Arm]
    residual: bool
    adapters: Mapping[str, Adapter]
    said: list[str] = field(default_factory=list)
    parts: list[Program] = field(default_factory=list)
    launches: list[Enqueued] = field(default_factory=list)
    temporaries: list[Tensor] = field(default_factory=list)
    persistent: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        gate, up, down = self.gate_up.site[GATE], self.gate_up.site[UP], self.down.site[DOWN]
        self.label = label_of(gate.layer, FFN)
        if not gate.n == up.n == down.k:
            found = f"found N={gate.n} of gate, N={up.n} of up, K={down.k} of down"
            raise PlanError(f"{self.label}: {found}, expected one intermediate size")
        if self.context.dims.activation not in KINDS:
            raise PlanError(
                f"{self.label}: found activation {self.context.dims.activation!r}, expected one of {', '.join(KINDS)}"
            )
        self.width = gate.n
        self.activation, self.limit = self.context.dims.activation, self.context.dims.activation_limit
        if not 0 <= self.limit < inf:
            raise PlanError(f"{self.label}: found an activation limit of {self.limit}, expected 0 for none or more")
        for role in self.adapters:
            if role not in (GATE, UP, DOWN):
                raise PlanError(f"{self.label}: found an adapter of {role!r}, expected one of {GATE}, {UP}, {DOWN}")
        *first, self.second = served(self.gate_up, self.down, self.m)
        self.first = tuple(first)

    @property
    def grouped(self) -> bool:
        """Whether one call computes gate, then up."""
        return self.first[0].roles == (GATE, UP)

    def program(self) -> tuple[Program, tuple[str, ...]]:
        m, i = self.m, self.width
        x = Tensor("bf16", (m, self.gate_up.site.k), f"{self.label}/x")
        y = Tensor("bf16", (m, self.down.site[DOWN].n), f"{self.label}/y")
        beside = Tensor("bf16", (m, self.down.site[DOWN].n), f"{self.label}/residual") if self.residual else None
        last = Epilogue(residual=beside)
        place = self._place()
        if place == "epilogue":
            h = self._temporary("h", i)
            self._project(self.first[0], x, h, epilogue=Epilogue(activation=self.activation, limit=self.limit))
            self._project(self.second, h, y, epilogue=last)
        elif place == "input":
            gu = self._temporary("gu", 2 * i)
            self._project(self.first[0], x, gu)
            self._project(self.second, gu, y, epilogue=last, prologue=True)
        else:
            g, u = self._halves(x)
            h = self._temporary("h", i)
            self.launches.append(self._gated(g, u, h))
            self._project(self.second, h, y, epilogue=last)
        served = ", ".join(dict.fromkeys(a.arm for a in (*self.first, self.second)))
        made = Program(
            name=f"{self.label} M={m} {served}, gated={place}",
            launches=after_libraries(self.launches),
            inputs=(x, beside) if beside else (x,),
            outputs=(y,),
            persistent=tuple(dict.fromkeys((*(t for p in self.parts for t in p.persistent), *self.persistent))),
            temporaries=tuple(self.temporaries),
        )
        return made, tuple(dict.fromkeys(self.said))

    def _place(self) -> str:
        """Where the gated product is computed, and in `said` why not where the lever asks for it."""
        wanted = self.context.levers.gated
        lacks, clamp = "", "clamps no inputs of its product"
        if wanted != "launch" and not self.grouped:
            names = list(dict.fromkeys(a.arm for a in self.first))
            serve = "serves" if len(names) == 1 else "serve"
            lacks = f"{' and '.join(names)} {serve} {GATE} and {UP} in calls of their own"
        elif wanted == "epilogue" and "activation" not in self.arms[self.first[0].arm].epilogues:
            lacks = f"arm {self.first[0].arm} fuses no activation"
        elif wanted == "epilogue" and self.limit and "limit" not in self.arms[self.first[0].arm].epilogues:
            lacks = f"arm {self.first[0].arm} {clamp}"
        elif wanted == "epilogue" and not self.adapters.keys().isdisjoint((GATE, UP)):
            lacks = f"arm {self.first[0].arm} adds no LoRA before its activation"
        elif wanted == "input" and DOWN in self.adapters:
            lacks = f"the adapter of {DOWN} reads it"
        elif wanted == "input" and self.activation not in self.arms[self.second.arm].prologues:
            lacks = f"arm {self.second.arm} does not fuse {self.activation} into its input"
        elif wanted == "input" and self.limit and "limit" not in self.arms[self.second.arm].prologues:
            lacks = f"arm {self.second.arm} {clamp}"
        if lacks:
            self.said.append(f"{self.label} M={self.m}: gated={wanted}: {lacks}: a launch makes the gated product")
            return "launch"
        return wanted

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """gate·x and up·x, of one call or of two."""
        m, i = self.m, self.width
        if len(self.first) == 1:
            gu, roles = self._temporary("gu", 2 * i), self.first[0].roles
            self._project(self.first[0], x, gu)
            g, u = (gu.view(i * roles.index(role), (m, i), (2 * i, 1)) for role in (GATE, UP))
        else:
            g, u = self._temporary("g", i), self._temporary("u", i)
            for a, out in zip(self.first, (g, u), strict=True):
                self._project(a, x, out)
        return g, u

    def _temporary(self, name: str, columns: int) -> Tensor:
        t = Tensor("bf16", (self.m, columns), f"{self.label}/{name}")
        self.temporaries.append(t)
        return t

    def _project(
        self, a: Assignment, x: Tensor, y: Tensor, *, epilogue: Epilogue = Epilogue(), prologue: bool = False
    ) -> None:
        """The launches of one call of an arm, and of the LoRA addends of its projections: one alone is the epilogue's,
        those of a group are added to their columns of y."""
        arm, group = self.arms[a.arm], len(a.roles) > 1
        addends = {role: self._delta(role, x) for role in a.roles if role in self.adapters}
        if addends and not group:
            epilogue = replace(epilogue, lora=addends[a.roles[0]])
        call = replace(
            projection_call(self._members(a), a, self.m, self.context, epilogue),
            x=Operand(x),
            y=Operand(y),
            prologue=self.activation if prologue else "",
            prologue_limit=self.limit if prologue else 0.0,
        )
        made = finished(arm, call)
        self.parts.append(made)
        self.launches += made.launches
        self.temporaries += made.temporaries
        if group:
            for role, addend in addends.items():
                columns = y.view(self.width * a.roles.index(role), (self.m, self.width), (2 * self.width, 1))
                self.launches.append(adding(columns, (addend,), self.context))

    def _delta(self, role: str, x: Tensor) -> Tensor:
        """A role's LoRA addend of its product with x."""
        site = self.down.site if role == DOWN else self.gate_up.site
        made = delta(self.adapters[role], x, site[role].n, self.context, f"{self.label}/lora {role}")
        self.launches += made.launches
        self.temporaries += made.temporaries
        self.persistent += made.persistent
        return made.addend

    def _members(self, a: Assignment) -> tuple[Projection, ...]:
        site = self.down.site if a is self.second else self.gate_up.site
        return tuple(site[role] for role in a.roles)

    def _gated(self, g: Tensor, u: Tensor, h: Tensor) -> Launch:
        i = self.width
        vector = i % VECTOR == 0
        rows = tuple(t.strides[0] if t.strides else i for t in (g, u))
        launch = Launch(
            gated_product(vector=vector, clamp=self.limit > 0),
            grid=(self.m, -(-i // (THREADS * (VECTOR if vector else 1)))),
            block=THREADS,
            args=(g, u, h, i, *rows, kind_of(self.activation, self.limit)),
            label="gated product",
        )
        return settled(launch, self.context)
