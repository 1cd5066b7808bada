"""A Timeline, rendered: text, HTML, SVG, Perfetto JSON. Renderers only: nothing is computed here
that the timeline does not have."""
