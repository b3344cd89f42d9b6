from convert.program import jaxspec

jaxspec()
