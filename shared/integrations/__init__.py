"""Which other libraries can run on the twins?

Each folder here joins one library to both twins. It imports that library; nothing else in this
package does.
"""
